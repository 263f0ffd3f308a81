"""Boot one of Debian's own kernels under software emulation and run tests of this tree inside.

`fetch_kernel` unpacks a kernel package below a cache directory (never installed), `build_root` makes one ext4 image
with this machine's Python, the environment's packages, this tree, all compiled, and the tools the tests need, and
`boot` runs a command in it. The guest has no network device. The emulator ends with the guest or at the deadline. Run
as a program, this fetches the kernels for tests that have no way out.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUEST_TREE = Path("/podwire")
GUEST_PACKAGES = Path("/packages")
"""Where a guest has this tree and the environment's packages, wherever they are here: its /tmp and /run are others."""
KERNELS = {"6.1": "linux-image-cloud-amd64", "6.12": "linux-image-6.12-cloud-amd64"}
CACHE = ROOT / ".cache" / "vm"
IMAGE_BYTES = 700 << 20
MEMORY_MIB = 2048

MODULES_FIRST = ("virtio_pci", "virtio_blk")
"""What the root needs; built in is fine."""
MODULES = (
    *(
        "veth",
        "cls_bpf",
        "sch_ingress",
        "sch_tbf",
        "vxlan",
        "nf_tables",
        "nft_chain_nat",
        "nft_nat",
    ),
    *("nft_masq", "nft_ct", "nft_fib_inet", "nft_socket", "nf_conntrack", "bridge"),
)
TOOLS = ("ip", "tc", "nft", "ping", "bpftool", "nsenter", "mount", "umount", "stty", "sh")
PYTHON_PACKAGES_LEFT_OUT = ("mypy", "ruff", "uv", "grpc_tools", "mypyc", "pip", "setuptools")

# Emulated, each of five levels of page tables and each toggle of SMAP costs many times what it costs a processor; so do
# the long vectors that libc copies and compares with where there are any (a seventh of all of a guest's time), and what
# copies byte by byte in one instruction. Two CPUs that take turns on one thread of the emulator need no atomic
# instructions, and a CPU that waits for the other gives it the turn: a quarter less is computed.
EMULATION = (
    *("-accel", "tcg,thread=single", "-smp", "2"),
    *("-cpu", "max,la57=off,smap=off,smep=off,avx=off,avx2=off,erms=off"),
)
PLAIN_KERNEL_OPTIONS = "console=ttyS0 quiet panic=-1 random.trust_cpu=on"
KERNEL_OPTIONS = (
    f"{PLAIN_KERNEL_OPTIONS}"
    # What protects a kernel from its users and is slow here: return trampolines, and memory that is wiped.
    " mitigations=off init_on_alloc=0 hardened_usercopy=off randomize_kstack_offset=off nokaslr"
    " apparmor=0 audit=0 nowatchdog"
    # The emulator translates a page of code for each address that it is mapped at: where every process has its
    # libraries at the same ones, programs that live shortly find their code translated (a fifth of the time).
    " norandmaps"
    # Without it every change of a map of maps and every namespace that ends waits for a grace period of RCU.
    " rcupdate.rcu_expedited=1"
    # X86_FEATURE_REP_GOOD: pages are wiped and copied by loops, not by one instruction that is emulated step by step.
    " clearcpuid=112"
)

COMPILE = """unset PYTHONDONTWRITEBYTECODE
export PATH=/usr/bin HOME=/tmp LANG=C.UTF-8 PYTHONPATH={tree}:{site}
cd {tree} && exec python3 -m pytest --collect-only -q -p no:cacheprovider {files}
"""
BEGUN = "PODWIRE-BEGUN"
ENDED = "PODWIRE-EXIT"
BOOTS_MAX = 3
SILENCE_S = 2000.0
"""No test takes so long in a guest, even where others keep the machine busy."""
LOOK_S = 0.2

INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /root
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs dev /dev
for module in {modules}; do /bin/busybox modprobe $module 2>/dev/null; done
tries=0
until [ -b /dev/vda ] || [ $tries -ge 300 ]; do
    tries=$((tries + 1)); /bin/busybox sleep 0.1
done
/bin/busybox mount -t ext4 /dev/vda /root || {{ echo PODWIRE-NO-ROOT; /bin/busybox poweroff -f; }}
/bin/busybox mount -t proc proc /root/proc
/bin/busybox mount -t sysfs sysfs /root/sys
/bin/busybox mount -t devtmpfs dev /root/dev
/bin/busybox mount -t bpf bpf /root/sys/fs/bpf
/bin/busybox mount -t tmpfs tmpfs /root/tmp
/bin/busybox mount -t tmpfs tmpfs /root/run
/bin/busybox ip link set lo up
/bin/busybox chroot /root /bin/sh /run.sh
/bin/busybox poweroff -f
"""

RUN = """export PATH=/usr/bin:/usr/sbin:/bin:/sbin HOME=/tmp LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH={tree}:{site}
export PODWIRE_GUEST=1
stty -F /dev/ttyS1 raw -echo
echo "{begun}" > /dev/ttyS1
cd {tree}
python3 -c '{hold}' &
( {command} ) > /dev/ttyS1 2>&1
echo "{ended} $?" > /dev/ttyS1
"""


HOLD = (
    "import ctypes, socket, subprocess, time;"
    " held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
    " held.setsockopt(socket.SOL_SOCKET, 29, 1);"
    " ctypes.CDLL(None).unshare(0x40000000);"
    ' subprocess.run(["tc", "qdisc", "add", "dev", "lo", "clsact"]);'
    " time.sleep(1 << 30)"
)
"""Keeps a socket with SO_TIMESTAMP (29) open, and a clsact queue in a network namespace (0x40000000) of its own. The
first of a machine, with each ping for example, has the kernel patch __netif_receive_skb_core (netstamp_needed_key,
ingress_needed_key), and the last one has it patched back. An emulated CPU that executes it at that moment was seen to
go on in the middle of the instruction, and the kernel panicked.
"""


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel: its image and the folder `lib/modules/<release>`."""

    release: str
    image: Path
    modules: Path


class GuestUnavailable(Exception):
    """Something the tier needs is not to be had here; the message names it."""


class GuestDied(Exception):
    """Guests ended before their command did, or the emulator failed; the message is what was said last."""


class BuildFailed(Exception):
    """A guest's root could not be made of what is here; the message is what the program said that failed."""


def fetch_kernel(version: str, cache: Path) -> Kernel:
    """Unpack Debian's kernel of a version in KERNELS; the download is kept in `cache`. Raises GuestUnavailable."""
    package = KERNELS[version]
    depends = _output("apt-cache", "depends", package)
    names = [line.split()[1] for line in depends.splitlines() if "Depends: linux-image" in line]
    if not names:
        raise GuestUnavailable(f"package {package} is not to be had (apt-get update?)")
    if not names[0].startswith(f"linux-image-{version}."):
        raise GuestUnavailable(f"package {package} stands for {names[0]} on this machine")
    target = cache / names[0]
    if not (target / "done").exists():
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        try:
            _run("apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", names[0], cwd=target)
        except BuildFailed as error:
            raise GuestUnavailable(str(error)) from None
        [archive] = target.glob("*.deb")
        _run("dpkg", "-x", str(archive), str(target))
        [modules] = (target / "lib" / "modules").iterdir()
        for packed in modules.rglob("*.ko.xz"):
            _run("xz", "-d", str(packed))
        _run("depmod", "-b", str(target), modules.name)
        archive.unlink()
        (target / "done").touch()
    [image] = (target / "boot").glob("vmlinuz-*")
    [modules] = (target / "lib" / "modules").iterdir()
    return Kernel(modules.name, image, modules)


def build_root(directory: Path, files: Sequence[str]) -> Path:
    """Make the guest's root below `directory`, where these test files are compiled; gives the path of an ext4 image.

    Raises GuestUnavailable (a program is missing), BuildFailed.
    """
    root = directory / "root"
    for name in ("proc", "sys", "dev", "tmp", "run", "etc", "usr/bin", "usr/lib", "usr/sbin"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for link, target in {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib"}.items():
        (root / link).symlink_to(target)
    (root / "lib64").symlink_to("usr/lib64")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/tmp:/bin/sh\n")
    _copy_python(root)
    _copy_tree(root)
    for tool in TOOLS:
        path = shutil.which(tool)
        if path is None:
            raise GuestUnavailable(f"program {tool!r} is missing (scripts/setup installs it)")
        shutil.copy(os.path.realpath(path), root / "usr" / "bin" / tool)
    _copy_libraries(root)
    _compile(root, files)
    image = directory / "root.ext4"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    _run("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", str(root), str(image))
    shutil.rmtree(root)
    return image


def boot(kernel: Kernel, root: Path, command: str, directory: Path, timeout_s: float) -> str:
    """Run `command` in the tree inside the guest; gives all it printed.

    A guest that ends before its command has ended is booted again, BOOTS_MAX times altogether, and without the kernel's
    options that make it fast: an emulated kernel was seen to end in the middle of a command. What its console said is
    kept in the cache. Raises GuestDied when that does not help, TimeoutError when all of it takes longer than
    `timeout_s`, GuestUnavailable, BuildFailed.
    """
    image = directory / f"{kernel.release}.ext4"
    output, console = directory / f"{kernel.release}.out", directory / f"{kernel.release}.console"
    until_s = time.monotonic() + timeout_s
    # A guest computes all the time and other tests mostly wait: they go first, so that their deadlines hold. At
    # nice 19 two guests still ran for minutes after all other tests had ended.
    before = [
        *("nice", "-n", "5"),
        *("qemu-system-x86_64", *EMULATION, "-m", str(MEMORY_MIB)),
        *("-nodefaults", "-no-reboot", "-display", "none"),
        *("-kernel", str(kernel.image), "-initrd", str(_initramfs(kernel, directory))),
        *("-drive", f"file={image},if=virtio,format=raw,cache=unsafe"),
        *("-serial", f"file:{console}", "-serial", f"file:{output}"),
    ]
    try:
        for attempt in range(BOOTS_MAX):
            # Anew each time: a guest that died has left its file system as it was at that moment.
            _copy_root(root, image, command)
            options = KERNEL_OPTIONS if attempt == 0 else PLAIN_KERNEL_OPTIONS
            _emulate([*before, "-append", options], output, until_s)
            begun, _, printed = output.read_text(errors="replace").partition(BEGUN)
            if ENDED in printed:
                return begun + printed
            kept = CACHE / f"died-{kernel.release}-{attempt}.console"
            kept.write_text(_tail(console) + begun + printed)
    except TimeoutError as error:
        said = output.read_text(errors="replace")[-1000:] + _tail(console)
        raise TimeoutError(f"{error}: {said}") from None
    finally:
        image.unlink(missing_ok=True)
    raise GuestDied(f"{BOOTS_MAX} boots of {kernel.release} ended early: {_tail(console)}")


def _copy_root(root: Path, image: Path, command: str) -> None:
    """Give a guest a root of its own, with the command that it runs."""
    shutil.copy(root, image)
    script = image.with_suffix(".sh")
    places = {"tree": GUEST_TREE, "site": GUEST_PACKAGES, "hold": HOLD}
    script.write_text(RUN.format(command=command, begun=BEGUN, ended=ENDED, **places))
    _run("debugfs", "-w", "-R", f"write {script} run.sh", str(image))


def _emulate(arguments: Sequence[str], output: Path, until_s: float) -> None:
    """Run the emulator until the guest ends; TimeoutError when it takes too long, or says nothing for too long."""
    heard_s = time.monotonic()
    said = 0
    output.write_bytes(b"")
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as guest:
        try:
            while guest.poll() is None:
                time.sleep(LOOK_S)
                now_s, size = time.monotonic(), output.stat().st_size
                heard_s = now_s if size != said else heard_s
                said = size
                if now_s > until_s:
                    raise TimeoutError("the guest did not end in time")
                if now_s - heard_s > SILENCE_S:
                    raise TimeoutError(f"the guest said nothing for {SILENCE_S:.0f} s")
        finally:
            guest.kill()
        assert guest.stderr is not None
        if guest.returncode:
            raise GuestDied(f"the emulator failed: {guest.stderr.read().decode()[-1000:]}")


def _tail(console: Path) -> str:
    return console.read_text(errors="replace")[-3000:]


def _initramfs(kernel: Kernel, directory: Path) -> Path:
    tree = directory / f"initramfs-{kernel.release}"
    (tree / "bin").mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox is None:
        raise GuestUnavailable("program 'busybox' is missing (package busybox-static)")
    shutil.copy(busybox, tree / "bin" / "busybox")
    modules = tree / "lib" / "modules" / kernel.release
    modules.mkdir(parents=True)
    for path in kernel.modules.glob("modules.*"):
        shutil.copy(path, modules / path.name)
    for relative in _module_closure(kernel, (*MODULES_FIRST, *MODULES)):
        (modules / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(kernel.modules / relative, modules / relative)
    init = tree / "init"
    init.write_text(INIT.format(modules=" ".join((*MODULES_FIRST, *MODULES))))
    init.chmod(0o755)
    archive = directory / f"{kernel.release}.cpio"
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    with archive.open("wb") as file:
        subprocess.run(
            ["cpio", "--quiet", "-o", "-H", "newc"],
            input=names.encode(),
            stdout=file,
            cwd=tree,
            check=True,
        )
    return archive


def _module_closure(kernel: Kernel, names: Iterable[str]) -> list[str]:
    """Give the files of modules and of all they depend on, by modules.dep (`path: path path`)."""
    wanted = set(names)
    files: set[str] = set()
    for line in (kernel.modules / "modules.dep").read_text().splitlines():
        path, _, dependencies = line.partition(":")
        if Path(path).stem.replace("-", "_") in wanted:
            files.update([path, *dependencies.split()])
    return sorted(files)


def _compile(root: Path, files: Sequence[str]) -> None:
    """Let pytest compile in the root what it will read there: under emulation that would take minutes."""
    script = 'mount --rbind /dev "$0/dev" && mount --rbind /proc "$0/proc" && exec chroot "$0" "$@"'
    compiling = COMPILE.format(tree=GUEST_TREE, site=GUEST_PACKAGES, files=" ".join(files))
    _run("unshare", "--mount", "sh", "-c", script, str(root), "/bin/sh", "-c", compiling)


def _copy_python(root: Path) -> None:
    """Copy interpreter and standard library to the same paths, and the environment's packages."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    left_out = shutil.ignore_patterns("test", "idlelib", "tkinter", "site-packages")
    shutil.copytree(stdlib, _inside(root, stdlib), ignore=left_out, dirs_exist_ok=True)
    site = Path(sysconfig.get_path("purelib"))
    shutil.copytree(
        site,
        _inside(root, GUEST_PACKAGES),
        ignore=shutil.ignore_patterns(*PYTHON_PACKAGES_LEFT_OUT),
        dirs_exist_ok=True,
    )
    interpreter = Path(os.path.realpath(sys.executable))
    _inside(root, interpreter).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(interpreter, _inside(root, interpreter))
    python = root / "usr" / "bin" / "python3"
    if not python.exists():
        python.symlink_to(interpreter)


def _copy_tree(root: Path) -> None:
    tree = _inside(root, GUEST_TREE)
    for name in ("podwire", "tests", "bpf", "build", "scripts"):
        if (ROOT / name).exists():
            shutil.copytree(
                ROOT / name,
                tree / name,
                ignore=shutil.ignore_patterns("__pycache__"),
                symlinks=True,
            )
    shutil.copy(ROOT / "pyproject.toml", tree / "pyproject.toml")


def _copy_libraries(root: Path) -> None:
    """Copy every shared library that anything in the root needs, to where the loader looks."""
    needed: set[str] = {str(path) for path in Path("/lib64").glob("ld-linux*")}
    for path in root.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                continue
        listed = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=False)
        for line in listed.stdout.splitlines():
            target = line.split("=>")[-1].split()[0]
            if target.startswith("/") and not target.startswith(str(root)):
                needed.add(target)
    for extra in ("libbpf.so.1", "libnftables.so.1"):
        needed.update(str(path) for path in Path("/usr/lib").glob(f"*/{extra}"))
    for library in needed:
        place = _inside(root, Path("/usr/lib64" if "ld-linux" in library else "/usr/lib"))
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(library), place / Path(library).name)


def _inside(root: Path, path: Path) -> Path:
    return root / str(path).lstrip("/")


def _run(*arguments: str, cwd: Path | None = None) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-1000:]
        raise BuildFailed(f"{' '.join(arguments[:2])} failed: {said}")


def _output(*arguments: str) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    return done.stdout


def main() -> None:
    """Fetch the kernels; SystemExit says what is not to be had."""
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        for version in KERNELS:
            fetch_kernel(version, CACHE)
    except GuestUnavailable as reason:
        sys.exit(str(reason))


if __name__ == "__main__":
    main()
