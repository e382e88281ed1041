#!/usr/bin/env python3
"""Whether a GPU takes roots and quotients as a processor does: the one thing about its bits that no emulation can tell.

    gpu_arithmetic.py               all 2^32 roots and 2^33 quotients in fp32, 2^30 of each in double precision, 2^31 estimated roots of codes
    gpu_arithmetic.py --part 64     a 64th of that
    gpu_arithmetic.py --compile     without a GPU: makes the device code, and says what instructions it takes

clang makes PTX of gpu_arithmetic.cu as the build makes it of the kernels, and the driver compiles that. The processor's side is numpy's.
Quotients are of random bit patterns, half of them of numbers near each other, where roundings are close. NaN are equal whatever their bits.
Codes of int8 come from estimated roots (src/vec/cuda.h); half of these are next to where a code ends.
"""
import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
#: elements of a launch
PIECE = 1 << 25


def ptx():
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "arithmetic.ptx")
        made = subprocess.run(["clang", "-x", "cuda", "--cuda-device-only", "--cuda-gpu-arch=sm_80", "-nocudainc", "-nocudalib", "-Xclang", "-target-feature",
                               "-Xclang", "+ptx74", "-ffp-contract=off", "-std=c++17", "-O2", "-Wno-everything", f"-I{ROOT}/src", f"-I{ROOT}/include", "-S",
                               "-o", out, f"{ROOT}/lab/gpu_arithmetic.cu"], capture_output=True, text=True)
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
        device, context, self.module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, 100, device)
        self.name = name.value.decode()
        self.call("cuModuleLoadData", ctypes.byref(self.module), code)
        self.rooms = [self.allocate(8 * PIECE) for _ in range(2)]

    def call(self, name, *arguments):
        code = getattr(self.driver, name)(*arguments)
        if code:
            sys.exit(f"gpu_arithmetic.py: {name}: CUDA error {code}")

    def allocate(self, size):
        place = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
        return place

    def run(self, kernel, like, inputs=(), *numbers):
        """What a kernel leaves in its first room: an array like `like`; the inputs go into the rooms before."""
        import numpy
        for room, values in zip(self.rooms, inputs):
            self.call("cuMemcpyHtoD_v2", room, ctypes.c_void_p(values.ctypes.data), ctypes.c_size_t(values.nbytes))
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), self.module, kernel.encode())
        held = [self.rooms[0], *([self.rooms[1]] if len(inputs) > 1 else []), *(ctypes.c_uint32(n) for n in numbers)]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(one) for one in held))
        self.call("cuLaunchKernel", function, len(like) // 256, 1, 1, 256, 1, 1, 0, None, places, None)
        out = numpy.empty_like(like)
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), self.rooms[0], ctypes.c_size_t(out.nbytes))
        return out


def compare(kernel, given, expected, inputs):
    """How many differ; the first few are printed."""
    import numpy
    bits = numpy.uint32 if given.dtype == numpy.float32 else numpy.uint64
    wrong = (given.view(bits) != expected.view(bits)) & ~(numpy.isnan(given) & numpy.isnan(expected))
    for i in numpy.flatnonzero(wrong)[:3]:
        print(f"     {kernel} of {', '.join(float(x[i]).hex() for x in inputs)}: {float(given[i]).hex()}, expected {float(expected[i]).hex()}")
    return int(wrong.sum())


def pairs(random, n, kind, whole):
    """Two arrays of floats of any bits; in every other piece the second is near the first, but for its exponent."""
    a, b = (random.integers(0, whole, n, dtype=kind, endpoint=True) for _ in range(2))
    if random.integers(2):
        b = a ^ (b & kind(0x1ff)) ^ (kind(1) << kind(8 * a.itemsize - 3))
    return a, b


def radicands(random, n):
    """What int8's codes are roots of, below zero in part, and random bits; in every other piece within 6 of the end of a code."""
    import numpy
    draws = random.integers(0, 1 << 16, n, dtype=numpy.uint32)
    if random.integers(2):
        root = random.integers(0, 128, n) * 65536.0 - draws + random.uniform(-6, 6, n)
        return (numpy.clip(root, 0, 127 * 65536.0) ** 2).astype(numpy.float32), draws
    return (random.uniform(-0.1, 1, n) * (127 * 65536.0) ** 2 * 2.0 ** random.integers(-80, 1, n)).astype(numpy.float32), draws


def codes(radicand, draws):
    """As every processor takes them."""
    import numpy
    found = []
    for x, r in ((radicand, draws), (abs(radicand), 0xffff - draws)):
        root = numpy.sqrt(numpy.maximum(x, numpy.float32(0)))
        found.append((numpy.rint(root).astype(numpy.uint32) + r) >> 16)
    return (found[0] << 16 | found[1]).view(numpy.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, default=1, help="only an N-th of all")
    parser.add_argument("--compile", action="store_true", help="only make the device code")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    code = ptx()
    used = sorted(set(re.findall(r"\b(?:r?sqrt|rcp|div)\.[a-z.0-9]+", code.decode())))
    print("instructions: " + ", ".join(used))
    if used != ["div.rn.f32", "div.rn.f64", "rcp.approx.ftz.f32", "rsqrt.approx.ftz.f32", "sqrt.rn.f32", "sqrt.rn.f64"]:
        sys.exit("gpu_arithmetic.py: not those of the kernels")
    if given.compile:
        return 0
    import numpy
    numpy.seterr(all="ignore")
    gpu, random, wrong = Gpu(code + b"\0"), numpy.random.default_rng(given.seed), 0
    print(gpu.name)
    for what, kernel, kind, pieces in (("roots", "roots", numpy.float32, (1 << 32) // PIECE), ("quotients", "quotients", numpy.float32, (1 << 33) // PIECE),
                                       ("codes of estimated roots", "codes", numpy.float32, (1 << 31) // PIECE),
                                       ("roots in double", "double_roots", numpy.float64, (1 << 30) // PIECE),
                                       ("quotients in double", "double_quotients", numpy.float64, (1 << 30) // PIECE)):
        bits = numpy.uint32 if kind == numpy.float32 else numpy.uint64
        different, many = 0, max(1, pieces // given.part)
        for piece in range(many):
            if kernel == "roots":
                first = piece * given.part * PIECE
                inputs = [numpy.arange(first, first + PIECE, dtype=numpy.uint32).view(kind)]
                found, expected = gpu.run(kernel, inputs[0], (), first), numpy.sqrt(inputs[0])
            elif kernel == "codes":
                inputs = [x.view(kind) for x in radicands(random, PIECE)]
                found, expected = gpu.run(kernel, inputs[0], inputs), codes(inputs[0], inputs[1].view(bits))
            else:
                inputs = [x.view(kind) for x in pairs(random, PIECE, bits, numpy.iinfo(bits).max)][:1 if "root" in what else 2]
                found = gpu.run(kernel, inputs[0], inputs)
                expected = numpy.sqrt(inputs[0]) if "root" in what else inputs[0] / inputs[1]
            different += compare(what, found, expected, inputs)
        print(f"{'ok  ' if not different else 'FAIL'} {many * PIECE} {what}: {different} differ", flush=True)
        wrong += different
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
