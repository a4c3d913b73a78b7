"""Put scripts and recipes into the built package, where `tandem` finds them; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithScripts(build_py):
    """Build the package, and copy scripts and recipes into `mm_utils`."""

    def run(self) -> None:
        """Build; an editable install reads the scripts where they are."""
        super().run()
        if not self.editable_mode:
            for folder, files in (("scripts", "*.py"), ("recipes", "*.yaml")):
                place = Path(self.build_lib, "mm_utils", folder)
                place.mkdir(parents=True, exist_ok=True)
                for file in Path(__file__).with_name(folder).glob(files):
                    shutil.copy(file, place)


setup(cmdclass={"build_py": WithScripts})
