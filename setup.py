"""Builds both extension modules with CMake; everything else is in pyproject.toml.

Environment variables (see CONTRIBUTING.md):

LLGA_FUSER_ONEDNN          a oneDNN install prefix, or "source" to build it
LLGA_FUSER_ONEDNN_SOURCE   local oneDNN source for LLGA_FUSER_ONEDNN=source
dnnl_DIR                   directory of dnnl-config.cmake
ONEDNN_BUILD_GRAPH_PYTHON_BINDING   OFF leaves dnnl_graph out
LLGA_FUSER_BUILD_DIR       CMake's build directory, build/cmake-<python> by default
CMAKE_ARGS                 further arguments for CMake
CMAKE_BUILD_TYPE           Release by default
CMAKE_BUILD_PARALLEL_LEVEL number of compile jobs
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
EXT_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# A translation unit that includes the JIT headers takes 0.9 to 1.6 GB.
KILOBYTES_PER_JOB = 2 << 20


def binding_enabled() -> bool:
    value = os.environ.get("ONEDNN_BUILD_GRAPH_PYTHON_BINDING", "ON").upper()
    return value not in ("OFF", "0", "FALSE", "NO", "N", "")


def installed_file(distribution: str, name: str) -> Path | None:
    """The file of that name in an installed distribution.

    In an isolated build the distributions are in the build environment: neither sys.prefix nor
    always PATH leads there, but the distribution itself knows where its files went.
    """
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(f.locate())).resolve() for f in files if f.name == name]
    found = [f for f in found if f.is_file()]
    # The wheel of CMake has a Python script of that name in front of the program itself.
    return min(found, key=lambda f: (f.parent.parent.name != "data", str(f)), default=None)


def tool(name: str) -> str:
    """The build requirement's own executable, or else the one on PATH."""
    found = installed_file(name, name) or shutil.which(name)
    if not found:
        raise SystemExit(f"{name} was not found; `pip install {name}`")
    return str(found)


def package_directory(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the Python package {name} is needed to build llga_fuser")
    return spec.submodule_search_locations[0]


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def onednn_arguments() -> list[str]:
    choice = os.environ.get("LLGA_FUSER_ONEDNN", "")
    if choice == "source":
        source = os.environ.get("LLGA_FUSER_ONEDNN_SOURCE", "")
        if source:
            source = str(Path(source).resolve())
        return ["-DLLGA_FUSER_ONEDNN=source", f"-DLLGA_FUSER_ONEDNN_SOURCE={source}"]
    if choice:
        return [f"-DLLGA_FUSER_ONEDNN={Path(choice).resolve()}"]
    if os.environ.get("dnnl_DIR"):
        return [f"-Ddnnl_DIR={Path(os.environ['dnnl_DIR']).resolve()}"]
    config = installed_file("onednn-devel-cpu-gomp", "dnnl-config.cmake")
    return [f"-Ddnnl_DIR={config.parent}"] if config else []


def parallel_jobs() -> int:
    cores = len(os.sched_getaffinity(0))
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return max(1, min(cores, int(available[1]) // KILOBYTES_PER_JOB)) if available else cores


def onednn_state() -> list[object]:
    """What tells one external oneDNN from another at the same place."""
    choice = os.environ.get("LLGA_FUSER_ONEDNN", "")
    if choice == "source":
        source = os.environ.get("LLGA_FUSER_ONEDNN_SOURCE", "")
        if source and Path(source).is_dir():
            return [time.time_ns()]  # somebody may be at work there: let ninja look at every file
        files = [Path(source)] if source else []
    else:
        directory = os.environ.get("dnnl_DIR", "")
        if not choice and not directory:
            return []  # the wheels, known by their version
        prefix = Path(choice) if choice else Path(directory, "../../..")
        files = [*prefix.glob("lib*/**/libdnnl.so*"), *prefix.glob("include/oneapi/dnnl/*.h*")]
    return [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(files)]


def fingerprint(arguments: list[str]) -> str:
    """Everything that decides what comes out of the build, but for where the inputs are.

    An isolated build has torch in a new place each time, which makes every object out of date for
    ninja although nothing has changed. This tells that nothing has.
    """
    compiler = os.environ.get("CXX", "c++")
    described = subprocess.run(
        [*shlex.split(compiler), "--version"], capture_output=True, text=True, check=False
    ).stdout
    ephemeral = ("-DTorchJit_ROOT=", "-Dpybind11_DIR=", "-Ddnnl_DIR=", "-DPython_EXECUTABLE=")
    state = {
        "python": [sys.version, EXT_SUFFIX],
        "distributions": {
            name: version_of(name)
            for name in ("torch", "pybind11", "onednn-cpu-gomp", "onednn-devel-cpu-gomp")
        },
        "onednn": onednn_state(),
        "compiler": [compiler, described],
        "arguments": [a for a in arguments if not a.startswith(ephemeral)],
        "environment": {
            name: os.environ.get(name, "")
            for name in ("CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CMAKE_BUILD_TYPE", "dnnl_DIR")
        },
    }
    digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode())
    inputs = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", ROOT / "setup.py"]
    for directory in ("cmake", "csrc"):
        inputs += [f for f in (ROOT / directory).rglob("*") if f.is_file()]
    for file in sorted(inputs):
        digest.update(f"\n{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def replace_tree(source: Path, destination: Path) -> None:
    """Copies a tree over another, each file in one step: a process may have the old one mapped."""
    for file in source.rglob("*"):
        if file.is_file():
            target = destination / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.copy2(file, temporary)
            os.replace(temporary, target)


class CMakeBuild(build_ext):
    """One CMake project for all extension modules.

    What it installs goes to the wheel and also beside the Python sources in the checkout. Python
    puts the current directory first on sys.path, so from the checkout's directory
    `python -m llga_fuser` and `python -m pytest` import the checkout: without its own copy of the
    extension modules it would hide the package that pip has just installed.
    """

    def run(self) -> None:
        if not sys.platform.startswith("linux"):
            raise SystemExit("llga_fuser supports Linux only")
        build = Path(
            os.environ.get("LLGA_FUSER_BUILD_DIR")
            or ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        ).resolve()
        build.mkdir(parents=True, exist_ok=True)
        with open(build / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            staged = self.build_with_cmake(build)
            self.deliver(staged)

    def deliver(self, staged: Path) -> None:
        if not (self.inplace or self.editable_mode):
            replace_tree(staged, Path(self.build_lib).resolve())
        binding = ROOT / f"dnnl_graph/_dnnl_graph{EXT_SUFFIX}"
        for old in (binding, *ROOT.glob("llga_fuser/lib/*")):
            if not (staged / old.relative_to(ROOT)).exists():
                old.unlink(missing_ok=True)
        replace_tree(staged, ROOT)

    def build_with_cmake(self, build: Path) -> Path:
        staged = build / "stage"
        cmake = tool("cmake")
        arguments = [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DTorchJit_ROOT={package_directory('torch')}",
            f"-DONEDNN_BUILD_GRAPH_PYTHON_BINDING={'ON' if binding_enabled() else 'OFF'}",
            *onednn_arguments(),
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        if binding_enabled():
            pybind11 = Path(package_directory("pybind11")) / "share" / "cmake" / "pybind11"
            arguments.append(f"-Dpybind11_DIR={pybind11}")

        stamp = build / "fingerprint"
        wanted = fingerprint(arguments)
        if staged.is_dir() and stamp.is_file() and stamp.read_text() == wanted:
            print(f"-- nothing has changed since the last build in {build}", flush=True)
            return staged

        stamp.unlink(missing_ok=True)
        configure = [
            *[cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"],
            *["-S", str(ROOT), "-B", str(build), *arguments],
        ]
        # Paths that CMake remembers are those of the last build environment, which may be gone.
        last = build / "configure-command"
        command = shlex.join(configure)
        if not last.is_file() or last.read_text() != command:
            configure.insert(1, "--fresh")
        self.spawn(configure)
        last.write_text(command)
        environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(parallel_jobs()), **os.environ}
        subprocess.run([cmake, "--build", str(build)], env=environment, check=True)
        shutil.rmtree(staged, ignore_errors=True)
        self.spawn([cmake, "--install", str(build), "--prefix", str(staged)])
        stamp.write_text(wanted)
        return staged


class CleanBuildPy(build_py):
    """Forgets the last build's files: build/ outlives a module that was renamed or deleted."""

    def run(self) -> None:
        if not self.editable_mode:
            for package in ("llga_fuser", "dnnl_graph"):
                shutil.rmtree(Path(self.build_lib) / package, ignore_errors=True)
        super().run()


packages = ["llga_fuser", "llga_fuser.*"]
extensions = [Extension("llga_fuser._C", sources=[])]
if binding_enabled():
    packages += ["dnnl_graph", "dnnl_graph.*"]
    extensions.append(Extension("dnnl_graph._dnnl_graph", sources=[]))

setup(
    packages=find_packages(str(ROOT), include=packages),
    package_data={"*": ["py.typed", "*.pyi", "*.html"]},
    ext_modules=extensions,
    cmdclass={"build_ext": CMakeBuild, "build_py": CleanBuildPy},
    zip_safe=False,
)
