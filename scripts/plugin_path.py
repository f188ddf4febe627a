"""Makes the plugin importable by the scripts, which run from a checkout without installing it."""

import sys

from run_command import ROOT

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
