"""The order of hooks, their failures, and what is undone; commands and signals."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from leasehold.v1 import errors_pb2
from leasehold.v1.hook_pb2 import CommandHook, Hook, KernelHook, SignalHook, VllmHook, WorkDrain
from leasehold_worker.errors import OperationError
from leasehold_worker.hooks import runner
from leasehold_worker.hooks.context import HookRecord
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity, identify, is_alive, send_signal, wait_ended

from tests.worker.dead_volumes import dead_volume
from tests.worker.framework_servers import ScriptedServer, VllmServer, serving
from tests.worker.hook_contexts import AFTER, BEFORE, DISCARD, OFFLOAD, READINESS, RETAIN, context, http_hook
from tests.worker.programs.test_programs import ignored_signals


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving(ScriptedServer()) as started:
        yield started


class ServingProgram:
    """An application that serves a kernel."""

    def __init__(self, failure: OperationError | None = None) -> None:
        self.calls: list[str] = []
        self.failure = failure

    async def prepare(self, timeout_s: float) -> None:
        self.calls.append("prepare")
        if self.failure:
            raise self.failure

    async def cancel(self, timeout_s: float) -> None:
        self.calls.append("cancel")


def command(name: str, *arguments: str, phase: int = BEFORE, timeout_s: float = 20) -> Hook:
    hook = Hook(name=name, phase=AFTER if phase == AFTER else BEFORE)
    hook.command.CopyFrom(CommandHook(arguments=arguments))
    hook.timeout.FromMilliseconds(int(timeout_s * 1000))
    return hook


async def test_the_order_of_all_ways(server: ScriptedServer, tmp_path: Path) -> None:
    drained = http_hook("drained", f"{server.url}/drained/{{phase}}")
    for part in ("stop_admitting", "idle", "admit_again"):
        getattr(drained.drain, part).MergeFrom(http_hook(part, f"{server.url}/{part}").http)
    with serving(VllmServer()) as vllm:
        # Both write into one list, so that their order can be seen.
        vllm.calls = server.calls
        engine = VllmHook(url=vllm.url, suspend_method="suspend_nccl", resume_method="resume_nccl")
        hooks = [
            http_hook("first", f"{server.url}/first/{{phase}}"),
            Hook(name="a", vllm=engine),
            http_hook("last", f"{server.url}/last/{{phase}}", AFTER),
            drained,
            Hook(name="kernel", kernel=KernelHook()),
        ]
        application = ServingProgram()
        used = context(hooks, tmp_path, kernel=application)
        await runner.down(used)
        down = [
            "/first/before_suspend",
            "/collective_rpc",
            "/stop_admitting",
            "/idle",
            "/drained/before_suspend",
        ]
        assert server.paths() == down
        assert application.calls == ["prepare"]
        server.calls.clear()
        await runner.up(used)
        assert server.paths() == ["/collective_rpc", "/last/after_restore", "/admit_again"]
        assert application.calls == ["prepare", "cancel"]
        server.calls.clear()
        await runner.down(used)
        server.calls.clear()
        assert await runner.roll_back(used) == []
        assert server.paths() == ["/collective_rpc", "/last/rollback", "/admit_again"]


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_a_failure_in_any_place_undoes_what_was_begun(
    server: ScriptedServer, tmp_path: Path, failing: int
) -> None:
    hooks = [http_hook(f"h{number}", f"{server.url}/h{number}") for number in range(3)]
    for number, hook in enumerate(hooks):
        hook.drain.CopyFrom(
            WorkDrain(
                stop_admitting=http_hook("", f"{server.url}/stop{number}").http,
                idle=http_hook("", f"{server.url}/idle{number}").http,
                admit_again=http_hook("", f"{server.url}/admit{number}").http,
            )
        )
    server.answers = {f"/h{failing}": [409]}
    with pytest.raises(OperationError) as error:
        await runner.down(context([*hooks, http_hook("undo", f"{server.url}/undo", AFTER)], tmp_path))
    assert error.value.reason == errors_pb2.ERROR_REASON_HOOK_FAILED
    assert error.value.metadata == {"hook": f"h{failing}", "phase": "before_suspend"}
    assert "answered 409" in error.value.message
    calls = server.paths()
    undo = calls[calls.index(f"/h{failing}") + 1 :]
    assert undo == ["/undo", *(f"/admit{number}" for number in range(failing, -1, -1))]


async def test_a_hook_that_can_not_be_undone_is_a_warning(server: ScriptedServer, tmp_path: Path) -> None:
    hooks = [http_hook("down", f"{server.url}/down"), http_hook("up", f"{server.url}/up", AFTER)]
    server.answers = {"/down": [500], "/up": [0]}
    used = context(hooks, tmp_path)
    with pytest.raises(OperationError, match=r"hook down .*before the suspend"):
        await runner.down(used)
    (warning,) = used.warnings
    assert "hook up (http) during the rollback failed" in warning
    assert used.record.notes == {"up"}, "the rollback is incomplete"
    server.answers = {}
    assert await runner.roll_back(used) == []
    assert used.record.notes == frozenset()


async def test_what_fails_on_the_way_up_holds_up_nothing_else(server: ScriptedServer, tmp_path: Path) -> None:
    hooks = [http_hook(name, f"{server.url}/{name}", AFTER) for name in ("a", "b", "c")]
    server.answers = {"/a": [302], "/b": [500]}  # a redirect is not followed
    used = context(hooks, tmp_path)
    with pytest.raises(OperationError, match=r"hook a .*answered 302"):
        await runner.up(used)
    assert server.paths() == ["/a", "/b", "/c"]
    assert "hook b" in used.warnings[0]


async def test_only_hooks_of_the_weight_strategy_are_called(server: ScriptedServer, tmp_path: Path) -> None:
    hooks = [http_hook(name, f"{server.url}/{name}") for name in ("all", "offload", "both")]
    hooks[1].weight_strategies.append(OFFLOAD)
    hooks[2].weight_strategies.extend([OFFLOAD, DISCARD])
    for strategy, paths in (
        (RETAIN, ["/all"]),
        (OFFLOAD, ["/all", "/offload", "/both"]),
        (DISCARD, ["/all", "/both"]),
    ):
        server.calls.clear()
        await runner.down(context(hooks, tmp_path, strategy))
        assert server.paths() == paths


async def test_a_cancelled_way_down_is_undone(server: ScriptedServer, tmp_path: Path) -> None:
    server.held.add("/down")
    hooks = [http_hook("down", f"{server.url}/down"), http_hook("up", f"{server.url}/up/{{phase}}", AFTER)]
    used = context(hooks, tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.down, used)
        with trio.fail_after(10):
            await server.wait_call()
        nursery.cancel_scope.cancel()
    assert server.paths() == ["/down", "/up/rollback"]


async def test_an_answer_that_does_not_come_times_out(server: ScriptedServer, tmp_path: Path) -> None:
    server.held.add("/slow")
    hook = http_hook("slow", f"{server.url}/slow")
    hook.timeout.FromMilliseconds(200)
    with pytest.raises(OperationError, match=r"timed out after 0.2 s \(POST .*/slow did not answer\)"):
        await runner.down(context([hook], tmp_path))


async def test_templates_of_requests(server: ScriptedServer, tmp_path: Path) -> None:
    hook = http_hook(
        "a", f"{server.url}/{{workload}}?m={{members}}", method="PUT", body='{{"by": "{policy}"}}'
    )
    await runner.down(context([hook], tmp_path))
    assert server.calls == ['PUT /llm?m=41,42 {"by": "retain+cuda_suspend"}']


async def test_memory_of_other_hooks_is_checked_where_they_say_so(
    server: ScriptedServer, tmp_path: Path
) -> None:
    readings = [100, 40]

    async def measure() -> int | None:
        return readings.pop(0)

    hook = http_hook("free", f"{server.url}/free")
    hook.frees_memory = True
    await runner.down(context([hook], tmp_path, measure=measure))
    assert readings == []


async def test_a_kernel_that_is_not_ready_says_so_itself(tmp_path: Path) -> None:
    application = ServingProgram(
        OperationError(errors_pb2.ERROR_REASON_KERNEL_NOT_READY, "in the middle of a step")
    )
    hook = Hook(name="kernel", kernel=KernelHook())
    with pytest.raises(OperationError, match=r"hook kernel: in the middle of a step") as error:
        await runner.down(context([hook], tmp_path, kernel=application))
    assert error.value.reason == errors_pb2.ERROR_REASON_KERNEL_NOT_READY
    assert application.calls == ["prepare", "cancel"]


async def test_a_kernel_that_nobody_serves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match=r"is not checkpointable"):
        await runner.down(context([Hook(name="kernel", kernel=KernelHook())], tmp_path))


async def test_a_kernel_that_has_not_reconnected_yet_is_waited_for(tmp_path: Path) -> None:
    application = ServingProgram()

    async def registers(timeout_s: float) -> ServingProgram:
        await trio.lowlevel.checkpoint()
        return application

    hooks = [Hook(name="kernel", kernel=KernelHook())]
    await runner.up(context(hooks, tmp_path, wait_kernel=registers))
    assert application.calls == ["cancel"]


async def test_a_kernel_that_does_not_reconnect_fails_the_restore_but_no_rollback(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The loss of its stream has ended its quiescence."""
    hooks = [Hook(name="kernel", kernel=KernelHook())]
    assert await runner.roll_back(context(hooks, tmp_path, record=HookRecord(["kernel"]))) == []
    with pytest.raises(OperationError, match="had not registered again") as error:
        await runner.up(context(hooks, tmp_path))
    assert error.value.reason == errors_pb2.ERROR_REASON_HOOK_FAILED


async def test_a_defect_on_the_way_back_does_not_keep_others_from_it(
    server: ScriptedServer, tmp_path: Path
) -> None:
    class Broken(ServingProgram):
        async def cancel(self, timeout_s: float) -> None:
            raise RuntimeError("nobody thought of this")

    hooks = [Hook(name="kernel", kernel=KernelHook()), http_hook("up", f"{server.url}/up", AFTER)]
    used = context(hooks, tmp_path, kernel=Broken())
    await runner.down(used)
    (warning,) = await runner.roll_back(used)
    assert "nobody thought of this" in warning
    assert server.paths() == ["/up"]


async def test_a_command_gets_its_arguments_and_its_environment(tmp_path: Path) -> None:
    script = 'echo "$1 $LEASEHOLD_HOOK_WORKLOAD $LEASEHOLD_HOOK_PHASE ${{LEASEHOLD_WORKLOAD_ID-none}}" > out'
    await runner.down(context([command("a", "sh", "-c", script, "sh", "{members}/{policy}")], tmp_path))
    assert (tmp_path / "out").read_text() == "41,42/retain+cuda_suspend llm before_suspend none\n"


async def test_a_command_that_fails_tells_the_end_of_its_output(tmp_path: Path) -> None:
    script = "print('x' * 200_000); print('no such tenant'); raise SystemExit(7)"
    told = r"exited with 7: correct the program, then try again; its output: x+\nno such tenant"
    with pytest.raises(OperationError, match=told) as error:
        await runner.down(context([command("a", sys.executable, "-c", script)], tmp_path))
    assert len(error.value.message) < 3000


async def test_a_command_that_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/no/such/interpreter\n")
    (tmp_path / "script").chmod(0o755)
    remedy = "; make the program work on the worker's host, then try again"
    for program, folder, why in (
        (
            "no-such-program",
            tmp_path,
            "no such program in the PATH of hooks on the worker, or its interpreter is missing",
        ),
        ("./script", tmp_path, "no such program on the worker, or its interpreter is missing"),
        (str(tmp_path), tmp_path, f"Permission denied: '{tmp_path}'"),
        ("true", tmp_path / "gone", f"No such file or directory: '{tmp_path / 'gone'}'"),
    ):
        with pytest.raises(OperationError) as error:
            await runner.down(context([command("a", program)], folder))
        assert error.value.message.endswith(f" failed: {program} could not be started: {why}{remedy}")


async def test_a_program_on_a_volume_that_does_not_answer_takes_its_timeout_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold_worker.hooks.command_hook.END_DEADLINE_S", 0.1)
    program = str(tmp_path / "volume/program")
    hooks = [command("a", program, timeout_s=1)]
    with (
        dead_volume(tmp_path / "volume"),
        trio.fail_after(15),
        pytest.raises(OperationError, match="was still running"),
    ):
        await runner.down(context(hooks, tmp_path))


async def test_a_command_has_the_signals_of_any_program(tmp_path: Path) -> None:
    await runner.down(context([command("a", "sh", "-c", "grep SigIgn /proc/self/status > out")], tmp_path))
    assert ignored_signals(tmp_path / "out") == set()


LEAVE_A_CHILD = "sleep 300 & cat /proc/$!/stat > child"


def left_child(folder: Path) -> ProcessIdentity:
    """The child that such a command has, by what it was when it was started."""
    stat = (folder / "child").read_text()
    pid, start_time_ticks = int(stat.split()[0]), int(stat.rpartition(")")[2].split()[19])
    return ProcessIdentity(Pid(pid), start_time_ticks)


async def test_a_command_that_times_out_is_killed_with_its_children(tmp_path: Path) -> None:
    script = f"{LEAVE_A_CHILD}; echo waiting; wait"
    with pytest.raises(
        OperationError, match=r"timed out after 3 s .sh was still running; its output: waiting"
    ):
        await runner.down(context([command("a", "sh", "-c", script, timeout_s=3)], tmp_path))
    with trio.fail_after(10):
        await wait_ended(left_child(tmp_path))


async def test_a_command_of_root_that_times_out_fails_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker without root can't kill what sudo has started."""
    kill = os.killpg

    def refuse(group: int, number: int) -> None:
        kill(group, number)  # the test leaves nothing behind
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("leasehold_worker.hooks.command_hook.os.killpg", refuse)
    with pytest.raises(OperationError, match="timed out after 1 s") as error:
        await runner.down(context([command("a", "sleep", "1000", timeout_s=1)], tmp_path))
    assert error.value.reason == errors_pb2.ERROR_REASON_HOOK_FAILED
    assert "runs as another user, and goes on" in caplog.text


async def test_a_command_without_a_thread_of_the_worker_fails_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*arguments: object, **options: object) -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("leasehold_worker.hooks.command_hook.trio.lowlevel.open_process", refuse)
    with pytest.raises(OperationError, match="true could not be started: can't start new thread"):
        await runner.down(context([command("a", "true")], tmp_path))


async def test_a_child_in_the_background_does_not_hold_up_a_command(tmp_path: Path) -> None:
    await runner.down(context([command("a", "sh", "-c", LEAVE_A_CHILD)], tmp_path))
    child = left_child(tmp_path)
    assert is_alive(child), "it was not waited for"
    send_signal(child, signal.SIGKILL)


@pytest.fixture
def waiter() -> Iterator[subprocess.Popen[str]]:
    """A process that waits for SIGUSR1, and says so."""
    program = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); "
        "print('ready', flush=True); signal.sigwait([signal.SIGUSR1]); print('got it')"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


async def test_a_signal_reaches_the_first_process(waiter: subprocess.Popen[str], tmp_path: Path) -> None:
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == "ready\n"
    root = identify(waiter.pid)
    assert root is not None
    hook = Hook(name="usr1", phase=BEFORE, signal=SignalHook(signal_number=signal.SIGUSR1))
    await runner.down(context([hook], tmp_path, root=root))
    assert waiter.stdout.read() == "got it\n"
    waiter.wait(10)
    with pytest.raises(OperationError, match=r"SIGUSR1 was not sent: process .* has ended"):
        await runner.down(context([hook], tmp_path, root=root))


async def test_readiness_probes_succeed_or_say_why_not(server: ScriptedServer, tmp_path: Path) -> None:
    called = context(
        [
            http_hook("before", f"{server.url}/before"),
            http_hook("up", f"{server.url}/health/{{phase}}", READINESS, "GET"),
            http_hook("model", f"{server.url}/model", READINESS, "GET"),
            http_hook("after", f"{server.url}/after", AFTER),
        ],
        tmp_path,
    )
    server.answers["/health/readiness"] = [503]
    with pytest.raises(OperationError, match=r"hook up \(http\) as a readiness probe failed.*503") as refused:
        await runner.probe(called)
    assert refused.value.reason == errors_pb2.ERROR_REASON_HOOK_FAILED
    assert server.paths() == ["/health/readiness"]
    await runner.probe(called)
    assert server.paths()[1:] == ["/health/readiness", "/model"]
    await runner.down(called)
    await runner.up(called)
    assert server.paths()[3:] == ["/before", "/after"], "probes are no part of a way down or up"
