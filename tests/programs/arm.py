"""Run funcrec on aarch64 under qemu, with torch's own build for it: `make arm`, or

    PYTHONPATH=tests python -m programs.arm prepare | run WORD ...

prepare: downloads Python and libraries of Debian 12 (arm64), and torch's and CUDA's wheels for aarch64: 3 GB, as that
build of torch loads CUDA's libraries, and uses none of them. The kernels are compiled with aarch64-linux-gnu-g++. It
needs Debian, root, and the packages qemu-user-static and g++-aarch64-linux-gnu. run: Python in that surrounding.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "arm"
SYSTEM, SITE, OWN = FOLDER / "system", FOLDER / "site", FOLDER / "funcrec"
COMPILER, EMULATOR, PROCESSOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static", "neoverse-n1"
DEBIAN = words("""
    libc6 libstdc++6 libgcc-s1 libgomp1 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib python3.11 zlib1g
    libssl3 libffi8 libbz2-1.0 liblzma5 libexpat1 libsqlite3-0 libuuid1 libncursesw6 libtinfo6 libreadline8 libcrypt1
""")
WHEELS = words("""
    numpy optree tqdm typing-extensions sympy networkx jinja2 filelock fsspec setuptools
    cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==13.0.3
    nvidia-cudnn-cu13==9.20.0.48 nvidia-cusparselt-cu13==0.8.1 nvidia-nccl-cu13==2.29.7 nvidia-nvshmem-cu13==3.4.5
""")
FLAGS = (
    "-O3", "-DNDEBUG", "-std=c++17", "-fwrapv", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden",
    "-Wno-psabi", "-g0", "-fPIC", "-w",
)  # fmt: skip
CORE = """processor\t: {}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""


def missing() -> str:
    """Return what is missing, or nothing."""
    if not shutil.which(EMULATOR):
        return f"no {EMULATOR} here"
    return "" if (OWN / "kernels" / "cpp" / "_base.so").exists() and SITE.exists() else "not prepared: make arm"


def prepare() -> None:
    if not SITE.exists():
        download()
    (SYSTEM / "proc").mkdir(exist_ok=True)  # torch reads the processor's name; qemu shows the host's
    (SYSTEM / "proc" / "cpuinfo").write_text("".join(map(CORE.format, range(os.cpu_count() or 1))))
    kernels = ROOT / "kernels"
    objects = FOLDER / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    newest = max(x.stat().st_mtime for x in (kernels / "csrc").iterdir())
    for source in sorted((kernels / "csrc").glob("*.cpp")):
        if (made := objects / f"{source.stem}.o").exists() and made.stat().st_mtime > newest:
            continue
        do(COMPILER, *FLAGS, "-c", source, "-o", made)
    shutil.rmtree(OWN, ignore_errors=True)
    shutil.copytree(ROOT / "funcrec", OWN, ignore=shutil.ignore_patterns("__pycache__", "kernels"))
    shutil.copytree(kernels, OWN / "kernels", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    do(COMPILER, "-shared", *sorted(objects.glob("*.o")), "-lpthread", "-o", OWN / "kernels" / "cpp" / "_base.so")


def download() -> None:
    for folder in (SYSTEM, FOLDER / "debian", FOLDER / "wheels"):
        folder.mkdir(parents=True, exist_ok=True)
    do("dpkg", "--add-architecture", "arm64")
    do("apt-get", "update", "-qq")
    do("apt-get", "download", "-qq", *(f"{name}:arm64" for name in DEBIAN), cwd=FOLDER / "debian")
    for package in (FOLDER / "debian").glob("*.deb"):
        do("dpkg", "-x", package, SYSTEM)
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--python-version", "311")
    pip += tuple(word for n in range(17, 40) for word in ("--platform", f"manylinux_2_{n}_aarch64"))
    pip += ("--platform", "manylinux2014_aarch64", "--dest", FOLDER / "wheels")
    do(*pip, "--no-deps", f"torch=={torch.__version__.split('+')[0]}")
    do(*pip, *WHEELS)
    for wheel in (FOLDER / "wheels").glob("*.whl"):
        shutil.unpack_archive(wheel, SITE, "zip")


def do(*command: object, **options: object) -> None:
    subprocess.run([*map(str, command)], check=True, **options)


def run(arguments: list[str]) -> str:
    """Return what Python prints."""
    libraries = ":".join(map(str, (SITE / "nvidia").glob("*/lib")))
    own = {
        "PYTHONHOME": SYSTEM / "usr", "PYTHONPATH": f"{OWN.parent}:{ROOT / 'tests'}:{SITE}", "OMP_NUM_THREADS": 1,
        "LD_LIBRARY_PATH": libraries, "PYTHONDONTWRITEBYTECODE": 1,
    }  # fmt: skip
    given = [word for name, value in own.items() for word in ("-E", f"{name}={value}")]
    command = [EMULATOR, "-cpu", PROCESSOR, "-L", SYSTEM, *given, SYSTEM / "usr" / "bin" / "python3.11", *arguments]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LD_", "FUNCREC"))}
    done = subprocess.run([*map(str, command)], cwd=FOLDER, env=env, stdout=subprocess.PIPE, check=True, text=True)
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        print(run(sys.argv[2:]), end="")
    else:
        prepare()
