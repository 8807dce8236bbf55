"""`fit` under two agents of torchrun: one is lost, both begin again, and the world shrinks and grows.

    PYTHONPATH=tests python -m programs.two_agents FOLDER                      # prints a line for each run
    PYTHONPATH=tests unshare -rnm python -m programs.two_agents FOLDER apart   # the agents as on two machines

An agent and its ranks are lost at once, as with their machine (SIGKILL), or fall silent (SIGSTOP). With `apart` the
second agent has a network, a host name and processes of its own, reached over a link of 100 Mbit/s (iproute2's `ip` and
`tc`, and root in the namespaces of `unshare`), and the link is also cut. The other agent ends with an error that names
the lost ranks. Agents that begin again go on from the newest whole checkpoint, and end with the bits of an undisturbed
run. Other numbers of ranks end within 1e-6.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

NPROC = 2
ADDRESSES = ["127.0.0.1", "127.0.0.1"]
PREFIXES: list[list[str]] = [[], []]  # of the commands of each agent
LINK = ["v0", "v1"]


def apart():
    """Give the second agent a network, a host name and processes of its own, and a link of 100 Mbit/s to the first."""
    call = lambda *words: subprocess.run([*map(str, words)], check=True)
    space = subprocess.Popen(
        ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "3600"]
    )
    time.sleep(1)
    (inner,) = children(space.pid)
    enter = ["nsenter", "-t", str(inner), "-n", "-u", "-p", "-m"]
    call("ip", "link", "add", LINK[0], "type", "veth", "peer", "name", LINK[1])
    call("ip", "link", "set", LINK[1], "netns", inner)
    call(*enter, "hostname", "second")
    for node, address in enumerate(("10.9.0.1", "10.9.0.2")):
        PREFIXES[node], ADDRESSES[node] = enter * node, address
        call(*enter * node, "ip", "addr", "add", f"{address}/24", "dev", LINK[node])
        call(*enter * node, "ip", "link", "set", LINK[node], "up")
        call(*enter * node, "ip", "link", "set", "lo", "up")
        call(*enter * node, *f"tc qdisc add dev {LINK[node]} root tbf rate 100mbit burst 32kbit latency 400ms".split())
    return space


def rank(folder):
    """Train as one rank."""
    from programs import restarts

    folder = Path(folder)
    (folder / f"process{os.environ['RANK']}").write_text(f"{os.getpid()}")

    def callback(record):
        if record.when == "begin" and record.is_chief:
            with (folder / "began").open("a") as file:
                file.write(f"{record.step} {os.environ['WORLD_SIZE']}\n")
        if record.when == "step" and (folder / f"wait{record.step}").exists():
            (folder / f"at{os.environ['RANK']}").touch()
            time.sleep(600)

    restarts.train(folder / "run", callback)


def free_port():
    with socket.create_server((ADDRESSES[0], 0)) as server:
        return server.getsockname()[1]


def agents(folder, nprocs):
    """Start one agent for each number of ranks; return their processes."""
    port, out = free_port(), []
    for node, nproc in enumerate(nprocs):
        how = ["--nnodes", len(nprocs), "--node-rank", node, "--nproc-per-node", nproc, "--max-restarts", 0]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{port}", "--rdzv-id", folder.name]
        meet += ["--local-addr", ADDRESSES[node], "--rdzv-conf", f"is_host={int(node == 0)},join_timeout=120"]
        words = ["-m", "torch.distributed.run", *how, *meet, "-m", "programs.two_agents", folder, "rank"]
        with (folder / f"agent{node}.log").open("w") as log:
            command = [*PREFIXES[node], sys.executable, *map(str, words)]
            own = (
                os.environ
                | {"PYTHONPATH": str(Path(__file__).parents[1])}
                | ({"GLOO_SOCKET_IFNAME": LINK[node]} if PREFIXES[1] else {})
            )
            out.append(subprocess.Popen(command, stdout=log, stderr=log, env=own))
    return out


def finish(processes):
    codes = [p.wait(300) for p in processes]
    assert codes == [0] * len(codes), codes


def children(pid):
    """Return the processes that a process started, and theirs."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [y for x in found.split() for y in (int(x), *children(x))]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def lose(folder, node, signum, at):
    """Lose an agent with its ranks while all wait after step `at`; return (seconds, error) of the other agent's end.

    signum: what all its processes get; None cuts the link.
    """
    (folder / f"wait{at}").touch()
    both = agents(folder, [NPROC, NPROC])
    while len(list(folder.glob("at*"))) < 2 * NPROC:
        assert all(p.poll() is None for p in both), (folder / "agent0.log").read_text()
        time.sleep(0.2)
    lost = [both[node].pid, *children(both[node].pid)]
    began = time.monotonic()
    if signum is None:
        subprocess.run(["ip", "link", "set", LINK[0], "down"], check=True)
    for pid in lost if signum is not None else ():
        os.kill(pid, signum)
    (folder / f"wait{at}").unlink()
    other = both[1 - node]
    code, took = other.wait(200), time.monotonic() - began
    assert code != 0, "the other agent went on alone"
    for pid in lost if signum == signal.SIGSTOP else ():
        os.kill(pid, signal.SIGKILL)
    if signum is None:
        while any(is_running(pid) for pid in lost[2:]):
            assert time.monotonic() - began < 120, "the ranks behind the cut link wait on"
            time.sleep(0.2)
        print(f"  behind the cut link the ranks end after {time.monotonic() - began:.1f} s", flush=True)
        assert "does not answer" in (folder / f"agent{node}.log").read_text()
        for pid in [x for x in lost[:2] if is_running(x)]:  # torchrun's own agent waits for its store
            os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "link", "set", LINK[0], "up"], check=True)
    both[node].wait(100)
    text = (folder / f"agent{1 - node}.log").read_text()
    assert "funcrec.loop.watch: " in text, text
    for x in folder.glob("at*"):
        x.unlink()
    return took, next(line for line in text.splitlines() if "funcrec.loop.watch" in line)


def state_of(folder):
    import torch

    import funcrec as fr

    tree = fr.load(fr.latest(folder / "run"))
    return [tree[n] for n in ("state", "best", "position", "loss_sum")], torch.tensor(
        [h["loss"] for h in tree["history"]]
    )


def main(folder):
    from funcrec.testing import assert_trees_close

    root, began = Path(folder), time.monotonic()
    for name in ("alone", "lost", "elastic"):
        (root / name).mkdir(parents=True)
    finish(agents(root / "alone", [NPROC, NPROC]))
    want = state_of(root / "alone")
    print(f"two agents, 2 x 2 ranks: {time.monotonic() - began:.0f} s", flush=True)
    cut = [("the link is cut", 1, None, 20)] if PREFIXES[1] else []
    for what, node, signum, at in (
        ("the second agent is killed", 1, signal.SIGKILL, 5),
        ("the first agent, which has the store, is killed", 0, signal.SIGKILL, 11),
        ("the second agent falls silent", 1, signal.SIGSTOP, 17),
        *cut,
    ):
        took, text = lose(root / "lost", node, signum, at)
        print(f"{what}: the other one ends after {took:.1f} s: {text}", flush=True)
        if at == 5:
            shutil.copytree(root / "lost" / "run", root / "elastic" / "run")
    finish(agents(root / "lost", [NPROC, NPROC]))
    assert_trees_close(state_of(root / "lost"), want, rtol=0, atol=0)
    starts = (root / "lost" / "began").read_text().split("\n")[:-1]
    print(f"it ends with the bits of the undisturbed run; (step, ranks) of its starts: {starts}", flush=True)
    (root / "elastic" / "wait14").touch()
    one = agents(root / "elastic", [NPROC])
    while len(list((root / "elastic").glob("at*"))) < NPROC:
        assert one[0].poll() is None
        time.sleep(0.2)
    one[0].send_signal(signal.SIGTERM)
    (root / "elastic" / "wait14").unlink()
    one[0].wait(200)
    finish(agents(root / "elastic", [2, 1]))
    assert_trees_close(state_of(root / "elastic"), want, rtol=1e-6, atol=1e-6)
    starts = (root / "elastic" / "began").read_text().split("\n")[:-1]
    print(f"four ranks, then two, then three end within 1e-6; (step, ranks) of the starts: {starts}", flush=True)


if __name__ == "__main__":
    if sys.argv[2:] == ["rank"]:
        rank(sys.argv[1])
    else:
        space = apart() if sys.argv[2:] == ["apart"] else None
        try:
            main(sys.argv[1])
        finally:
            if space is not None:
                space.kill()
