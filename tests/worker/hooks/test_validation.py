"""What hooks may say."""

import pytest
from google.protobuf.duration_pb2 import Duration
from leasehold.v1 import errors_pb2
from leasehold.v1.eviction_pb2 import WEIGHT_STRATEGY_UNSPECIFIED
from leasehold.v1.hook_pb2 import (
    CommandHook,
    Hook,
    HookCredential,
    HttpHook,
    KernelHook,
    SglangHook,
    SignalHook,
    VllmHook,
    WorkDrain,
)
from leasehold_worker.errors import OperationError
from leasehold_worker.hooks.validation import (
    MOST_HOOKS,
    check_foreign_hooks,
    check_hooks,
    weights_hooks,
)

from tests.worker.hook_contexts import AFTER, BEFORE, DISCARD, OFFLOAD, READINESS, RETAIN, http_hook

URL = "http://127.0.0.1:8000"
IDLE = HttpHook(method="GET", url=f"{URL}/idle")
RELATIVE = HookCredential(file="token")
NO_VARIABLE = HookCredential(environment_variable="a=b")
VLLM = Hook(name="engine", vllm=VllmHook(url=URL))


def test_good_hooks_are_accepted() -> None:
    check_hooks(
        [
            VLLM,
            Hook(
                name="other", sglang=SglangHook(url=f"{URL}/", tags=["kv_cache"]), weight_strategies=[OFFLOAD]
            ),
            Hook(name="kernel", kernel=KernelHook(), timeout=Duration(seconds=5)),
            Hook(name="note", phase=AFTER, command=CommandHook(arguments=["logger", "{workload} {phase}"])),
            Hook(name="signal", phase=BEFORE, frees_memory=True, signal=SignalHook(signal_number=10)),
            http_hook(
                "call", f"{URL}/parked/{{workload}}?by={{policy}}", BEFORE, body='{{"who": "{workload}"}}'
            ),
            Hook(
                name="drained",
                phase=BEFORE,
                http=IDLE,
                drain=WorkDrain(stop_admitting=IDLE, idle=IDLE, admit_again=IDLE),
            ),
            http_hook("up", f"{URL}/health", READINESS, "GET"),
            Hook(name="there", phase=READINESS, command=CommandHook(arguments=["test", "-e", "ready"])),
        ]
    )


@pytest.mark.parametrize(
    ("field", "hook"),
    [
        ("name", Hook(vllm=VllmHook(url=URL))),
        ("name", Hook(name="a/b", vllm=VllmHook(url=URL))),
        ("action", Hook(name="a")),
        ("phase", Hook(name="a", vllm=VllmHook(url=URL), phase=BEFORE)),
        ("phase", Hook(name="a", http=IDLE)),
        ("phase", Hook(name="a", phase=READINESS, signal=SignalHook(signal_number=10))),
        ("phase", Hook(name="a", phase=READINESS, vllm=VllmHook(url=URL))),
        ("weight_strategies", Hook(name="a", phase=READINESS, http=IDLE, weight_strategies=[OFFLOAD])),
        ("frees_memory", Hook(name="a", phase=READINESS, http=IDLE, frees_memory=True)),
        ("drain", Hook(name="a", phase=READINESS, http=IDLE, drain=WorkDrain(idle=IDLE))),
        ("timeout", Hook(name="a", kernel=KernelHook(), timeout=Duration())),
        ("timeout", Hook(name="a", kernel=KernelHook(), timeout=Duration(seconds=-1))),
        ("timeout", Hook(name="a", kernel=KernelHook(), timeout=Duration(seconds=7200))),
        ("timeout", Hook(name="a", kernel=KernelHook(), timeout=Duration(seconds=10**14))),
        ("timeout", Hook(name="a", kernel=KernelHook(), timeout=Duration(seconds=-(2**63), nanos=2**31 - 1))),
        ("vllm.credential", Hook(name="a", vllm=VllmHook(url=URL, credential=HookCredential()))),
        ("sglang.credential.file", Hook(name="a", sglang=SglangHook(url=URL, credential=RELATIVE))),
        (
            "http.credential.environment_variable",
            Hook(name="a", phase=AFTER, http=HttpHook(method="GET", url=URL, credential=NO_VARIABLE)),
        ),
        (
            "drain.idle.credential.file",
            Hook(
                name="a",
                vllm=VllmHook(url=URL),
                drain=WorkDrain(idle=HttpHook(method="GET", url=URL, credential=RELATIVE)),
            ),
        ),
        (
            "weight_strategies",
            Hook(name="a", kernel=KernelHook(), weight_strategies=[WEIGHT_STRATEGY_UNSPECIFIED]),
        ),
        ("frees_memory", Hook(name="a", http=IDLE, phase=AFTER, frees_memory=True)),
        ("command.arguments", Hook(name="a", phase=AFTER, command=CommandHook())),
        ("command.arguments", Hook(name="a", phase=AFTER, command=CommandHook(arguments=["x", "{nobody}"]))),
        ("http.method", http_hook("a", URL, method="FETCH")),
        ("http.url", http_hook("a", "https://127.0.0.1/x")),
        ("http.url", http_hook("a", "ftp://127.0.0.1/x")),
        ("http.url", http_hook("a", "http:///x")),
        ("http.url", http_hook("a", "http://me:secret@127.0.0.1/x")),
        ("http.url", http_hook("a", "http://127.0.0.1:99999/x")),
        ("http.url", http_hook("a", "http://127.0.0.1/a b")),
        ("http.url", http_hook("a", "http://127.0.0.1/{nobody}")),
        ("http.body", http_hook("a", URL, body='{"a": 1}')),
        ("http.body", Hook(name="a", phase=AFTER, http=HttpHook(method="POST", url=URL, body=b"\xff"))),
        ("signal.signal_number", Hook(name="a", phase=AFTER, signal=SignalHook(signal_number=0))),
        ("signal.signal_number", Hook(name="a", phase=AFTER, signal=SignalHook(signal_number=9))),
        ("signal.signal_number", Hook(name="a", phase=AFTER, signal=SignalHook(signal_number=200))),
        ("vllm.url", Hook(name="a", vllm=VllmHook(url=f"{URL}/v1"))),
        ("vllm.suspend_method", Hook(name="a", vllm=VllmHook(url=URL, suspend_method="suspend_nccl"))),
        ("vllm.wake_tags", Hook(name="a", vllm=VllmHook(url=URL, wake_tags=["a&b"]))),
        ("vllm.wake_tags", Hook(name="a", vllm=VllmHook(url=URL, wake_tags=["weights", "weights"]))),
        ("sglang.url", Hook(name="a", sglang=SglangHook())),
        ("drain.idle", Hook(name="a", vllm=VllmHook(url=URL), drain=WorkDrain())),
        (
            "drain.admit_again",
            Hook(name="a", vllm=VllmHook(url=URL), drain=WorkDrain(idle=IDLE, stop_admitting=IDLE)),
        ),
        ("drain", Hook(name="a", phase=AFTER, http=IDLE, drain=WorkDrain(idle=IDLE))),
        (
            "drain.idle.url",
            Hook(name="a", phase=BEFORE, http=IDLE, drain=WorkDrain(idle=HttpHook(method="GET"))),
        ),
    ],
)
def test_a_bad_one_is_refused_by_its_field(field: str, hook: Hook) -> None:
    with pytest.raises(OperationError) as error:
        check_hooks([VLLM, hook])
    assert error.value.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT
    assert error.value.metadata["field"] == f"hooks[1].{field}"


def test_a_missing_phase_is_named_as_files_of_hooks_take_it() -> None:
    names = "HOOK_PHASE_BEFORE_SUSPEND, HOOK_PHASE_AFTER_RESTORE or HOOK_PHASE_READINESS"
    with pytest.raises(OperationError, match=f"hook a has no phase: give it {names}"):
        check_hooks([Hook(name="a", http=IDLE)])


def test_hooks_of_another_user_do_what_that_user_could_do() -> None:
    check_foreign_hooks(
        [
            VLLM,
            Hook(name="other", sglang=SglangHook(url="http://[::1]:30000")),
            Hook(name="kernel", kernel=KernelHook()),
            Hook(name="signal", phase=BEFORE, signal=SignalHook(signal_number=10)),
        ]
    )


@pytest.mark.parametrize(
    ("field", "hook"),
    [
        ("command", Hook(name="a", phase=AFTER, command=CommandHook(arguments=["id"]))),
        ("http", http_hook("a", URL)),
        ("drain", Hook(name="a", vllm=VllmHook(url=URL), drain=WorkDrain(idle=IDLE))),
        (
            "vllm.credential",
            Hook(name="a", vllm=VllmHook(url=URL, credential=HookCredential(file="/etc/key"))),
        ),
        ("vllm.url", Hook(name="a", vllm=VllmHook(url="http://169.254.169.254"))),
        ("sglang.url", Hook(name="a", sglang=SglangHook(url="http://localhost:30000"))),
    ],
)
def test_other_hooks_of_another_user_are_refused_by_their_field(field: str, hook: Hook) -> None:
    with pytest.raises(OperationError, match="for root and the worker's own user") as error:
        check_foreign_hooks([VLLM, hook])
    assert error.value.reason == errors_pb2.ERROR_REASON_NOT_PERMITTED
    assert error.value.metadata["field"] == f"hooks[1].{field}"


def test_names_are_unique_and_hooks_are_few() -> None:
    with pytest.raises(OperationError, match="two hooks have the name engine"):
        check_hooks([VLLM, VLLM])
    with pytest.raises(OperationError, match="exceed the limit"):
        check_hooks([VLLM] * (MOST_HOOKS + 1))


def test_which_hooks_do_the_weights() -> None:
    frees = Hook(name="frees", phase=BEFORE, http=IDLE, frees_memory=True, weight_strategies=[DISCARD])
    hooks = [VLLM, frees, Hook(name="kernel", kernel=KernelHook())]
    assert weights_hooks(hooks, RETAIN) == []
    assert weights_hooks(hooks, OFFLOAD) == [VLLM]
    assert weights_hooks(hooks, DISCARD) == [VLLM, frees]
