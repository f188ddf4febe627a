"""What pyproject.toml cannot say: a wheel has commands and recipes in fairseq_plugins/_commands.

There they collide with no other package's folders of these names; `fairseq-plugins` runs them.
"""

from setuptools import find_namespace_packages, find_packages, setup

FOLDERS = ("scripts", "benchmarks", "examples")
INSIDE = "fairseq_plugins._commands"

names = find_namespace_packages(include=[name for top in FOLDERS for name in (top, f"{top}.*")])
setup(
    packages=[
        *find_packages(include=["fairseq_plugins", "fairseq_plugins.*"]),
        *(f"{INSIDE}.{name}" for name in names),
    ],
    package_dir={f"{INSIDE}.{top}": top for top in FOLDERS},
    package_data={
        "fairseq_plugins": ["py.typed"],
        **{
            f"{INSIDE}.{name}": ["*.yaml", "*.json", "*.txt", "*.css", "*.js", "*.j2"]
            for name in names
        },
    },
)
