"""Kernels and a worker of their own process, which restarts."""

import subprocess

import pytest

from tests.worker.kernel_programs import SAVING

from .local_hosts import LocalHost

WATCHED = f"""{SAVING}
with local.claim(gpus=0, name="app"):
    app = App()
    with kernel.serve(app, facts) as served:
        say("begun")
        for line in sys.stdin:
            say("served" if served.is_served else "lost")
"""


def asks(host: LocalHost, process: subprocess.Popen[str], wanted: str) -> bool:
    """Whether a program says so of its kernel."""
    assert process.stdin is not None
    before = host.out(process).count("\n")
    process.stdin.write("?\n")
    process.stdin.flush()
    host.wait(lambda: host.out(process).count("\n") > before)
    return host.out(process).splitlines()[-1] == wanted


@pytest.mark.long
def test_a_kernel_comes_back_to_the_next_start_of_the_worker(restarting_host: LocalHost) -> None:
    host = restarting_host
    process = host.python(WATCHED, "", "1000")
    host.wait_line(process, "begun")
    for end in (host.kill_worker, host.stop_worker):
        assert asks(host, process, "served")
        end()
        host.wait(lambda: asks(host, process, "lost"))
        host.start_worker()
        host.wait(lambda: asks(host, process, "served"))
    assert host.log.count("is checkpointable") == 3
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    host.end(process)
