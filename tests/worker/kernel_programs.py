"""Programs that serve kernels, for tests: real processes, which do wrong what their arguments say."""

SAVING = '''
import os, sys, threading, time
from dataclasses import dataclass
from leasehold_client import kernel, local

mode, size, *rest = sys.argv[1:]
version = int(rest[0]) if rest else 1


def say(*words):
    print(*words, flush=True)


class Bytes:
    """Pieces of one checkpoint, of which never two are in memory."""
    def encode(self, size):
        if mode == "encode-fails":
            yield b"x" * 70_000
            raise ValueError("no more")
        if mode == "dies-in-the-middle":
            yield b"x" * 300_000
            os._exit(9)
        if mode == "stalls-in-the-middle":
            yield b"x" * 70_000
            released.wait()
        for start in range(0, size, 1_000_000):
            yield bytes([start // 1_000_000 % 251]) * min(1_000_000, size - start)
    def decode(self, data):
        if mode == "decode-fails":
            raise ValueError("can't be read")
        for start in range(0, len(data), 1_000_000):
            assert set(data[start:start + 1_000_000]) == {start // 1_000_000 % 251}
        return len(data)


released = threading.Event()


class App:
    def __init__(self):
        self.size = int(size)
        self.prepared = False
        self.raised = False
    def die(self, name):
        say(name)
        if mode == "raises-once-in-" + name and not self.raised:
            self.raised = True
            raise ValueError("told to")
        if mode == "dies-in-" + name:
            os._exit(9)
        if mode == "raises-in-" + name:
            raise ValueError("told to")
        if mode == "hangs-in-" + name:
            released.wait()
    def can_checkpoint(self):
        self.die("can_checkpoint")
        return (False, "in the middle of something") if mode == "busy" else (True, "")
    def checkpoint_size_estimate(self):
        self.die("estimate")
        return {"huge": 10**18, "unsized": None}.get(mode, self.size)
    def prepare(self):
        self.die("prepare")
        self.prepared = True
    def cancel(self):
        self.die("cancel")
        self.prepared = False
    def is_quiescent(self):
        self.die("is_quiescent")
        return self.prepared and mode != "restless"
    def checkpoint(self):
        self.die("checkpoint")
        return self.size
    def restore(self, size):
        self.die("restore")
        self.size = size
        say("restored", size)
    def health(self):
        return kernel.Health.DEGRADED


facts = kernel.KernelFacts(
    kernel_id="app", kind="test", version=version, codec=Bytes(), describe=lambda size: {"size": str(size)}
)
'''

THREADS = f"""{SAVING}
with local.claim(gpus=0, name="app"):
    app = App()
    with kernel.serve(app, facts) as served:
        say("begun", app.size, served.restored_checkpoint_id or "afresh")
        for line in sys.stdin:
            if line == "release\\n":
                released.set()
"""
"""Serves a kernel by plain threads until its input ends."""

TWICE = f"""{SAVING}
with local.claim(gpus=0, name="app"):
    with kernel.serve(App(), facts):
        say("begun")
        try:
            kernel.serve(App(), facts, wait_s=1)
        except kernel.LeaseholdError as error:
            say("refused", error.reason)
        sys.stdin.read()
"""
"""Serves two kernels in one workload."""

AGAIN = f"""{SAVING}
with local.claim(gpus=0, name="app"):
    for number in range(int(size)):
        with kernel.serve(App(), facts):
            say("served", number)
    say("done")
    sys.stdin.read()
"""
"""Serves so many kernels in one workload, one after another."""

CARELESS = f"""{SAVING}
with local.claim(gpus=0, name="app"):
    served = kernel.serve(App(), facts)
    say("begun")
"""
"""Ends without closing its kernel."""

FORKS = f"""{SAVING}
import multiprocessing
with local.claim(gpus=0, name="app"):
    with kernel.serve(App(), facts) as served:
        say("begun")
        child = multiprocessing.get_context("fork").Process(target=served.close)
        child.start()
        child.join(10)
        say("child", child.exitcode)
        say("served", served.is_served)
        sys.stdin.read()
"""
"""Closes its kernel in a fork of itself, as a fork's end would."""

STRANGER = f"""{SAVING}
os.environ["LEASEHOLD_WORKLOAD_ID"] = mode
try:
    kernel.serve(App(), facts, wait_s=1)
except kernel.LeaseholdError as error:
    say("refused", error.reason)
"""
"""Serves a kernel of a workload that it does not belong to."""

ASYNC = f"""{SAVING}
class AsyncApp:
    def __init__(self, app):
        self.app = app
    async def can_checkpoint(self):
        return self.app.can_checkpoint()
    async def checkpoint_size_estimate(self):
        return self.app.checkpoint_size_estimate()
    async def prepare(self):
        self.app.prepare()
    async def cancel(self):
        self.app.cancel()
    async def is_quiescent(self):
        return self.app.is_quiescent()
    async def checkpoint(self):
        return self.app.checkpoint()
    async def restore(self, size):
        self.app.restore(size)
    async def health(self):
        return self.app.health()

app = App()
"""

TRIO = f"""{ASYNC}
import trio
async def main():
    async with kernel.serve_trio(AsyncApp(app), facts) as served:
        say("begun", app.size, served.restored_checkpoint_id or "afresh")
        await trio.to_thread.run_sync(sys.stdin.read)
with local.claim(gpus=0, name="app"):
    trio.run(main)
"""

ASYNCIO = f"""{ASYNC}
import asyncio
async def main():
    async with kernel.serve_asyncio(AsyncApp(app), facts) as served:
        say("begun", app.size, served.restored_checkpoint_id or "afresh")
        await asyncio.to_thread(sys.stdin.read)
with local.claim(gpus=0, name="app"):
    asyncio.run(main())
"""
