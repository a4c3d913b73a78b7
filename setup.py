"""Put the scripts into the built package, where `tandem` finds them; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithScripts(build_py):
    """Build the package, and copy the scripts to `mm_utils/scripts`."""

    def run(self) -> None:
        """Build; an editable install reads the scripts where they are."""
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "mm_utils", "scripts")
            folder.mkdir(parents=True, exist_ok=True)
            for script in Path(__file__).with_name("scripts").glob("*.py"):
                shutil.copy(script, folder)


setup(cmdclass={"build_py": WithScripts})
