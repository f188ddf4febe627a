"""Published code in a checkout of the user's, to compare with.

None of that code is here: its licences are not this project's.
"""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from torch import nn


@dataclass(frozen=True)
class Checkout:
    """Where a published model's class is.

    Args:
        url: of the repository.
        module: the class's module, which lies at the root or in the folder.
        name: of the class.
        folder: of the repository; None where the module lies at the root.
        places: folders beside the module that it imports from.
    """

    url: str
    module: str
    name: str
    folder: str | None = None
    places: tuple[str, ...] = ()

    def find(self, path: Path) -> Path:
        """Folder of the module in a checkout, given that folder or the root.

        Raises ValueError when there is none.
        """
        for folder in (path, path / self.folder) if self.folder else (path,):
            if (folder / f"{self.module}.py").is_file():
                return folder.resolve()
        lack = f"neither it nor its folder {self.folder} has" if self.folder else "it has no"
        raise ValueError(
            f"--original is {path}, and {lack} {self.module}.py: give the folder of a checkout of "
            f"the published code, {self.url}"
        )

    def import_class(self, path: Path) -> type[nn.Module]:
        """The model's class in a checkout.

        Raises ValueError when it cannot be imported.
        """
        folder = self.find(path)
        places = [str(folder), *(str(folder / place) for place in self.places)]
        known = set(sys.modules)
        with mock.patch.object(sys, "path", places + sys.path):
            try:
                return getattr(importlib.import_module(self.module), self.name)
            except Exception as error:
                raise ValueError(
                    f"--original is {path}, whose {self.module}.py cannot be imported or has no "
                    f"{self.name} ({type(error).__name__}: {error}): give an unchanged checkout"
                ) from error
            finally:
                # names such as models and utils are left to others
                for name in set(sys.modules) - known:
                    file = getattr(sys.modules[name], "__file__", None)
                    if file and Path(file).is_relative_to(folder):
                        del sys.modules[name]
