"""Builds and tests the recipe for conda-forge by rattler-build, on a machine without a channel.

    build.py RECIPE CHANNEL PREFIX SITE

The packages that the recipe asks for come from the folder CHANNEL, which is made here, and which
receives the packages that are built too. They are stand-ins for those of conda-forge. The compiler
is the machine's, with conda-forge's variables. Libraries are links to those in PREFIX. Python is
the one that runs this, with the packages of the folder SITE. Programs are those in the path.
"""

import os
import pathlib
import platform
import shutil
import sys
import tempfile

from rattler_build import Stage0Recipe, ToolConfiguration, VariantConfig, assemble_package
from rattler_build.progress import SimpleProgressCallback

SUBDIR = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}[platform.machine()]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
# Sets what the compiler of conda-forge sets for a build, with its flags.
ACTIVATE = """
export CC=gcc CFLAGS="{flags} -ftree-vectorize -fPIC -fstack-protector-strong -O2 -pipe"
export CMAKE_PREFIX_PATH=$PREFIX
export CMAKE_ARGS="-DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX=$PREFIX"
export CMAKE_ARGS="$CMAKE_ARGS -DCMAKE_INSTALL_LIBDIR=lib"
"""


def link(source, target):
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(source)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def stand_ins(prefix, site):
    """Yields a name, a version, and a function that fills a folder, for each stand-in."""

    def program(name):
        return lambda folder: link(shutil.which(name), folder / "bin" / name)

    def library(*patterns):
        def fill(folder):
            for pattern in patterns:
                for file in prefix.glob(pattern):
                    link(file.resolve(), folder / file.relative_to(prefix))

        return fill

    def compiler(folder):
        flags = "-march=nocona -mtune=haswell" if SUBDIR == "linux-64" else ""
        write(folder / "etc/conda/activate.d/gcc.sh", ACTIVATE.format(flags=flags))

    def python(folder):
        # Python takes a folder with this file for its own.
        executable = pathlib.Path(os.path.realpath(sys.executable))
        write(folder / "pyvenv.cfg", f"home = {executable.parent}\n")
        link(executable, folder / "bin" / f"python{VERSION}")
        link(f"python{VERSION}", folder / "bin/python")

    def packages(folder):
        write(folder / f"lib/python{VERSION}/site-packages/stand-in.pth", f"{site}\n")

    yield f"gcc_{SUBDIR}", "14.0", compiler
    yield f"sysroot_{SUBDIR}", "2.17", None
    yield "onednn", "3.2", library("include/oneapi", "lib/libdnnl*")
    yield "jansson", "2.14", library("include/jansson*", "lib/libjansson*")
    yield "zlib", "1.2", library("include/z*.h", "lib/libz.*")
    for name in "cmake", "ninja", "pkg-config":
        yield name, "4.0", program(name)
    yield "python", f"{VERSION}.0", python
    yield "pytorch", "2.13.0", packages
    yield "scikit-build-core", "1.0", packages
    yield "pip", "26.0", None


def main(recipe, channel, prefix, site):
    for name, version, fill in stand_ins(prefix, site):
        with tempfile.TemporaryDirectory() as folder:
            write(pathlib.Path(folder) / "share/stand-ins" / name, "")
            if fill:
                fill(pathlib.Path(folder))
            assemble_package(name, version, SUBDIR, "0", channel / SUBDIR, files_dir=folder)
    variants = f"c_compiler: [gcc]\nc_stdlib: [sysroot]\npython: ['{VERSION}.* *']\n"
    results = Stage0Recipe.from_file(recipe).run_build(
        VariantConfig.from_yaml(variants),
        ToolConfiguration(test_strategy="native"),
        output_dir=channel,
        channels=[channel.as_uri()],
        progress_callback=SimpleProgressCallback(),
    )
    for result in results:
        for package in result.packages:
            print(f"ok   {package} {os.path.getsize(package)}")


if __name__ == "__main__":
    main(*(pathlib.Path(word).resolve() for word in sys.argv[1:]))
