"""Compiles the router's modules that pyproject.toml lists with mypyc into src/kvferry/_compiled.

    python scripts/compile_router.py [--optional]

Does nothing where the compiled modules fit the sources. With --optional, a host without mypy or a C compiler
is told so and the exit code is 0: the router then runs interpreted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).resolve().parent.parent
GROUP = "kvferry_router"
BUILD = """
import sys
from mypyc.build import mypycify
from setuptools import setup
group, config, temporary, library, *files = sys.argv[1:]
# What only an extra installs may be missing; what is compiled needs none of it.
options = ["--config-file", config, "--cache-dir", temporary + "/cache", "--ignore-missing-imports"]
extensions = mypycify(
    [*options, *files], opt_level="2", debug_level="0",
    group_name=group, multi_file=True, target_dir=temporary,
)
sys.argv = ["setup.py", "-q", "build_ext", "--build-temp", temporary, "--build-lib", library, "-j", "2"]
setup(name=group, ext_modules=extensions, packages=[])
"""


TRIAL = """
import importlib, sys
from pathlib import Path
from kvferry import compiled
root, made, *modules = sys.argv[1:]
compiled.install_once(Path(root), Path(made))
if compiled.state() != "compiled":
    sys.exit(compiled.state())
for module in modules:
    importlib.import_module(module)
"""


def freshness(checkout: Path) -> ModuleType:
    """kvferry.compiled of the checkout, loaded by its path: kvferry need not be installed."""
    spec = importlib.util.spec_from_file_location("_freshness", checkout / "src/kvferry/compiled.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listed(checkout: Path) -> list[str]:
    """The modules to compile, by name."""
    settings = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    return sorted(settings["tool"]["kvferry"]["compiled"]["modules"])


def maker(checkout: Path) -> str:
    """What the result depends on besides the sources: this script, and the compiler's version."""
    try:
        version = importlib.metadata.version("mypy")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    return f"{freshness(checkout).digest_of(Path(__file__))} mypy {version}"


def is_fresh(checkout: Path, modules: list[str]) -> bool:
    """Whether what is there was made of these modules' present sources, for this interpreter."""
    compiled, root = freshness(checkout), checkout / "src"
    try:
        stamp = compiled.read_stamp(root / "kvferry/_compiled")
    except (OSError, ValueError):
        return False
    return (
        sorted(stamp["modules"]) == modules
        and stamp.get("maker") == maker(checkout)
        and not compiled.unfit(root, root / "kvferry/_compiled", stamp)
    )


def compile_modules(checkout: Path, modules: list[str]) -> None:
    """Builds all modules elsewhere, tries them, and then puts them in place.

    Raises:
        subprocess.CalledProcessError: they cannot be compiled, or not be imported.
    """
    compiled, root = freshness(checkout), checkout / "src"
    # Before the build: a source that is edited during it must not pass for what was compiled.
    digests = {module: compiled.source_digest(root, module) for module in modules}
    directory = root / "kvferry/_compiled"
    made = directory.with_name("_compiled.new")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    try:
        extensions = built(checkout, modules, made)
        stamp = {
            "format": compiled.FORMAT,
            "suffix": compiled.suffix(),
            "maker": maker(checkout),
            "modules": digests,
            "extensions": extensions,
        }
        (made / compiled.STAMP).write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
        # Where wheels are built the router's own dependencies may be missing.
        if importlib.util.find_spec("msgspec") is not None:
            environment = os.environ | {"PYTHONPATH": str(root), compiled.SWITCH: ""}
            arguments = [str(root), str(made), *modules]
            subprocess.run([sys.executable, "-c", TRIAL, *arguments], env=environment, check=True)
        shutil.rmtree(directory, ignore_errors=True)
        made.rename(directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def built(checkout: Path, modules: list[str], made: Path) -> dict[str, str]:
    """Puts the extension modules into `made`; their digests by name."""
    compiled = freshness(checkout)
    extensions = {}
    with tempfile.TemporaryDirectory() as temporary:
        library = Path(temporary, "library")
        files = [module.replace(".", "/") + ".py" for module in modules]
        arguments = [GROUP, str(checkout / "pyproject.toml"), temporary, str(library), *files]
        subprocess.run([sys.executable, "-c", BUILD, *arguments], cwd=checkout / "src", check=True)
        for file in sorted(library.rglob("*" + compiled.suffix())):
            name = ".".join(file.relative_to(library).parts).removesuffix(compiled.suffix())
            shutil.copyfile(file, made / f"{name}{compiled.suffix()}")
            extensions[name] = compiled.digest_of(file)
    return extensions


def missing_tools() -> list[str]:
    """What this host lacks for a compilation."""
    packages = {"mypyc": "mypy", "setuptools": "setuptools"}
    lacking = [name for module, name in packages.items() if importlib.util.find_spec(module) is None]
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    if shutil.which(compiler.split()[0]) is None:
        lacking.append("a C compiler")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        lacking.append("Python's headers (python3-dev)")
    return lacking


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optional", action="store_true", help="exit with 0 where nothing can be compiled")
    optional = parser.parse_args().optional
    modules = listed(CHECKOUT)
    if is_fresh(CHECKOUT, modules):
        return 0
    if lacking := missing_tools():
        print(f"The router stays interpreted: to compile it, install {' and '.join(lacking)}.")
        return 0 if optional else 1
    print(f"Compiling {len(modules)} modules of the router", flush=True)
    try:
        compile_modules(CHECKOUT, modules)
    except subprocess.CalledProcessError:
        print("The router could not be compiled: see above. It runs interpreted.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
