#!/usr/bin/env python3
"""Whether a GPU takes roots and quotients as a processor does: the one thing about its bits that no
emulation can tell.

    gpu_arithmetic.py               all 2^32 roots and 2^33 quotients in fp32, 2^30 of each in
                                    double precision, 2^31 estimated roots of codes
    gpu_arithmetic.py --part 64     a 64th of that
    gpu_arithmetic.py --compile     without a GPU: makes the device code, and says what instructions
                                    it takes
    gpu_arithmetic.py --translated build/tests/cuda/libarithmetic.so
                                    without a GPU: runs the PTX on the processor, as tests do
                                    (tests/cuda). The build's target cuda_arithmetic makes the file
    gpu_arithmetic.py --ptx FILE    with the device code of a file, which --compile --ptx FILE
                                    writes, where there is no clang

clang makes PTX of gpu_arithmetic.cu as the build makes it of the kernels, and the driver compiles
that. The processor's side is numpy's. Quotients are of random bit patterns, half of them of numbers
near each other, where roundings are close. NaN are equal whatever their bits. Codes of int8 come
from estimated roots (src/vec/cuda.h); half of these are next to where a code ends.
"""

import argparse
import concurrent.futures
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
#: elements of a launch: on a GPU, and translated, where a part of all is spread over every exponent
PIECE = 1 << 25
TRANSLATED_PIECE = 1 << 14
#: makes device code as the build does (cmake/images.cmake)
CLANG = [
    *("clang", f"@{ROOT}/cmake/device_code.options"),
    *(f"-I{ROOT}/src", f"-I{ROOT}/include"),
]


def ptx():
    if not shutil.which("clang"):
        sys.exit(
            "gpu_arithmetic.py: no clang here, which makes the device code: elsewhere --compile"
            " --ptx FILE, then here --ptx FILE"
        )
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "arithmetic.ptx")
        made = subprocess.run(
            [*CLANG, "-S", "-o", out, f"{ROOT}/lab/gpu_arithmetic.cu"],
            capture_output=True,
            text=True,
        )
        if made.returncode:
            sys.exit("gpu_arithmetic.py: clang: " + made.stderr.strip()[-500:])
        with open(out, "rb") as file:
            return file.read()


class Gpu:
    """The first GPU, by the driver."""

    def __init__(self, code):
        try:
            self.driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            sys.exit(f"gpu_arithmetic.py: no driver: {error}")
        device, self.context, self.module, self.lock = (
            ctypes.c_int(),
            ctypes.c_void_p(),
            ctypes.c_void_p(),
            threading.Lock(),
        )
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self.call("cuCtxSetCurrent", self.context)
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, 100, device)
        self.name = name.value.decode()
        self.call("cuModuleLoadData", ctypes.byref(self.module), code)
        self.buffers = [self.allocate(8 * PIECE) for _ in range(2)]

    def call(self, name, *arguments):
        code = getattr(self.driver, name)(*arguments)
        if code:
            sys.exit(f"gpu_arithmetic.py: {name}: CUDA error {code}")

    def allocate(self, size):
        place = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
        return place

    def run(self, kernel, like, inputs=(), *numbers):
        """Returns what a kernel leaves in its first buffer: an array like `like`. The inputs go
        into the buffers before. One thread at a time runs."""
        with self.lock:
            self.call("cuCtxSetCurrent", self.context)
            return self.run_alone(kernel, like, inputs, *numbers)

    def run_alone(self, kernel, like, inputs, *numbers):
        import numpy

        for buffer, values in zip(self.buffers, inputs):
            self.call(
                "cuMemcpyHtoD_v2",
                buffer,
                ctypes.c_void_p(values.ctypes.data),
                ctypes.c_size_t(values.nbytes),
            )
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), self.module, kernel.encode())
        held = [
            self.buffers[0],
            *([self.buffers[1]] if len(inputs) > 1 else []),
            *(ctypes.c_uint32(n) for n in numbers),
        ]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(one) for one in held))
        self.call(
            "cuLaunchKernel", function, len(like) // 256, 1, 1, 256, 1, 1, 0, None, places, None
        )
        out = numpy.empty_like(like)
        self.call(
            "cuMemcpyDtoH_v2",
            ctypes.c_void_p(out.ctypes.data),
            self.buffers[0],
            ctypes.c_size_t(out.nbytes),
        )
        return out


class Translated:
    """The PTX as tests/cuda/translate.py has turned it into tables, in a library."""

    def __init__(self, path):
        try:
            self.library = ctypes.CDLL(os.path.abspath(path))
        except OSError as error:
            sys.exit(f"gpu_arithmetic.py: --translated {path}: {error}")
        self.name, self.lock = "translated PTX", threading.Lock()

    def run(self, kernel, like, inputs=(), *numbers):
        import numpy

        buffers = [numpy.array(values) for values in inputs] or [numpy.empty_like(like)]
        held = [
            *(ctypes.c_void_p(buffer.ctypes.data) for buffer in buffers),
            *(ctypes.c_uint32(n) for n in numbers),
        ]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(one) for one in held))
        with self.lock:
            if self.library.hstep_emulate_entry(kernel.encode(), len(like) // 256, places):
                sys.exit(f"gpu_arithmetic.py: the library has no kernel {kernel}")
        return buffers[0]


def compare(kernel, given, expected, inputs):
    """Returns how many values differ, and prints the first few."""
    import numpy

    bits = numpy.uint32 if given.dtype == numpy.float32 else numpy.uint64
    wrong = (given.view(bits) != expected.view(bits)) & ~(
        numpy.isnan(given) & numpy.isnan(expected)
    )
    for i in numpy.flatnonzero(wrong)[:3]:
        print(
            f"     {kernel} of {', '.join(float(x[i]).hex() for x in inputs)}:"
            f" {float(given[i]).hex()}, expected {float(expected[i]).hex()}"
        )
    return int(wrong.sum())


def pairs(random, n, kind, whole):
    """Returns two arrays of floats of any bits. In every other piece the second is near the first,
    but for its exponent."""
    a, b = (random.integers(0, whole, n, dtype=kind, endpoint=True) for _ in range(2))
    if random.integers(2):
        b = a ^ (b & kind(0x1FF)) ^ (kind(1) << kind(8 * a.itemsize - 3))
    return a, b


def radicands(random, n):
    """Returns squares that int8's codes are made from, and random bits. In every other piece the
    sums of roots and random bits are within 6 of the end of a code."""
    import numpy

    draws = random.integers(0, 1 << 16, n, dtype=numpy.uint32)
    if random.integers(2):
        root = random.integers(0, 128, n) * 65536.0 - draws + random.uniform(-6, 6, n)
        square = numpy.clip(root, 0, 126 * 65536.0) ** 2 + draws * (65536.0 - draws)
        return square.astype(numpy.float32), draws
    square = random.uniform(0, 1, n) * (126.5 * 65536.0) ** 2 * 2.0 ** random.integers(-80, 1, n)
    return square.astype(numpy.float32), draws


def codes(square, draws):
    """Returns the codes as every processor takes them."""
    import numpy

    found = []
    for r in (draws, 0xFFFF - draws):
        apart = (r.astype(numpy.int64) * (65536 - r.astype(numpy.int64))).astype(numpy.float32)
        root = numpy.sqrt(numpy.maximum(square - apart, numpy.float32(0)))
        found.append((numpy.rint(root).astype(numpy.uint32) + r) >> 16)
    return (found[0] << 16 | found[1]).view(numpy.float32)


#: what, kernel, type of C, how many
QUESTIONS = (
    ("roots", "roots", "float32", 1 << 32),
    ("quotients", "quotients", "float32", 1 << 33),
    ("codes of estimated roots", "codes", "float32", 1 << 31),
    ("roots in double", "double_roots", "float64", 1 << 30),
    ("quotients in double", "double_quotients", "float64", 1 << 30),
)


def judge(gpu, question, piece, size, part, seed):
    """Returns how many values of a piece differ. Its random values follow from its number and the
    seed alone."""
    import numpy

    what, kernel, name, _ = QUESTIONS[question]
    kind, random = getattr(numpy, name), numpy.random.default_rng((seed, question, piece))
    bits = numpy.uint32 if kind == numpy.float32 else numpy.uint64
    with numpy.errstate(all="ignore"):
        if kernel == "roots":
            first = piece * part * size
            inputs = [(numpy.arange(size, dtype=numpy.uint32) + numpy.uint32(first)).view(kind)]
            found, expected = gpu.run(kernel, inputs[0], (), first), numpy.sqrt(inputs[0])
        elif kernel == "codes":
            inputs = [x.view(kind) for x in radicands(random, size)]
            found, expected = (
                gpu.run(kernel, inputs[0], inputs),
                codes(inputs[0], inputs[1].view(bits)),
            )
        else:
            inputs = [x.view(kind) for x in pairs(random, size, bits, numpy.iinfo(bits).max)][
                : 1 if "root" in what else 2
            ]
            found = gpu.run(kernel, inputs[0], inputs)
            expected = numpy.sqrt(inputs[0]) if "root" in what else inputs[0] / inputs[1]
        return compare(what, found, expected, inputs)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, default=1, help="only an N-th of all")
    parser.add_argument("--compile", action="store_true", help="only make the device code")
    parser.add_argument(
        "--ptx", metavar="FILE", help="the device code: read, or written with --compile"
    )
    parser.add_argument("--translated", metavar="FILE", help="a library with the translated PTX")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--threads",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="of the processor's side, a gigabyte each (default: at most 8)",
    )
    given = parser.parse_args()
    if given.ptx and not given.compile:
        try:
            with open(given.ptx, "rb") as file:
                code = file.read()
        except OSError as error:
            sys.exit(f"gpu_arithmetic.py: --ptx {given.ptx}: {error.strerror}")
    else:
        code = ptx()
    used = sorted(set(re.findall(r"\b(?:r?sqrt|rcp|div)\.[a-z.0-9]+", code.decode())))
    print("instructions: " + ", ".join(used))
    if used != [
        "div.rn.f32",
        "div.rn.f64",
        "rcp.approx.ftz.f32",
        "rsqrt.approx.ftz.f32",
        "sqrt.approx.ftz.f32",
        "sqrt.rn.f32",
        "sqrt.rn.f64",
    ]:
        sys.exit("gpu_arithmetic.py: not those of the kernels")
    if given.compile:
        if given.ptx:
            with open(given.ptx, "wb") as file:
                file.write(code)
        return 0
    gpu = Translated(given.translated) if given.translated else Gpu(code + b"\0")
    size, wrong = TRANSLATED_PIECE if given.translated else PIECE, 0
    print(gpu.name)
    for question, (what, _, _, count) in enumerate(QUESTIONS):
        many = max(1, count // size // given.part)
        with concurrent.futures.ThreadPoolExecutor(given.threads) as pool:
            different = sum(
                pool.map(
                    lambda piece: judge(gpu, question, piece, size, given.part, given.seed),
                    range(many),
                )
            )
        print(
            f"{'ok  ' if not different else 'FAIL'} {many * size} {what}: {different} differ",
            flush=True,
        )
        wrong += different
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
