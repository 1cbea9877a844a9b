"""Where settings come from, and what is said of wrong ones."""

import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from leasehold_worker.agent import daemon
from leasehold_worker.agent.cli import command
from leasehold_worker.agent.config_file import load_config
from leasehold_worker.errors import StartError
from leasehold_worker.files.enrolment_file import Enrolment, write_enrolment
from leasehold_worker.session.enrolment import read_ticket

from tests.settings_files import UNREADABLE, make_unreadable

GPU = "GPU-12345678-1234-1234-1234-123456789abc"


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text('coordinator = "a:1"\nname = "from-file"\n[labels]\nrack = "7"\n')
    config = load_config(file, coordinator="b:2", name=None)
    assert (config.coordinator, config.name, config.labels) == ("b:2", "from-file", {"rack": "7"})


def test_an_empty_flag_is_refused() -> None:
    with pytest.raises(StartError, match="--metrics-listen is empty: give a value, or leave it out"):
        load_config(None, metrics_listen="")


def test_an_empty_path_is_not_the_present_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command, ["--state-dir", ""])
    assert done.exit_code == 2
    assert "the value is empty" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "coordinator = 5",
            "invalid value of coordinator: expected text, got a whole number",
        ),
        ("memory_limit = [1]", "of memory_limit: expected a whole number or text, got a list"),
        ('log_format = "xml"', "of log_format: not one of its values: 'xml'"),
        ('state_dir = ""', "of state_dir: the path is empty: give a path, or leave it out"),
        (r'socket_group = "a\u0000"', "of socket_group: it has a NUL character: leave it out"),
        ('metrics_tls_key = ""', "of metrics_tls_key: the path is empty"),
        ("state_dir = 3", "of state_dir: 3 is not a path: write a string"),
        (
            'coordinater = "a:1"',
            r"worker\.toml has the unknown key 'coordinater': did you mean 'coordinator'\?",
        ),
        ("zzz = 1", r"the unknown key 'zzz': remove it \(docs/cli.md#settings lists the keys\)"),
        ("= nonsense", "is malformed"),
        ('coordinator = "nowhere"', "HOST:PORT"),
        ('coordinator = "host:99999"', "HOST:PORT"),
        ('name = "rack/1"', "invalid worker name"),
        ('name = ""', "invalid worker name"),
        ('gpus = ["0"]', "invalid GPU UUID '0'"),
        ("gpus = []", "gpus names no GPU: name one or more, or leave it out for all of this host's"),
        ('labels = {"a b" = "c"}', "invalid key 'a b' in labels: use at most 128 letters"),
        (f'labels = {{"a" = "{"b" * 4096}"}}', "labels have 4097 bytes, and the limit is 4096: give less"),
        (f"gpus = {[GPU, GPU.upper()]}", "names GPU-.* twice: name each GPU once"),
    ],
)
def test_a_wrong_file_is_named_with_its_fault(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(text)
    with pytest.raises(StartError, match=match):
        load_config(file)


def test_a_file_that_is_not_utf_8_is_refused_without_texts_of_python(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_bytes(b'name = "\xff"')
    with pytest.raises(StartError, match=r"worker\.toml is not UTF-8 \(byte 9\): write it as UTF-8$"):
        load_config(file)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_bytes(b'\xef\xbb\xbfname = "alpha"\n')
    assert load_config(file).name == "alpha"


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="can't be read: No such file"):
        load_config(tmp_path / "none.toml")


def test_every_setting_can_stand_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(
        """
        coordinator = "10.0.0.5:7400"
        state_dir = "/var/lib/leasehold/worker"
        name = "alpha"
        log_level = "debug"
        driver_call_floor_s = 12.5
        proof_timeout_s = 3
        kernel_quiescence_s = 600
        kernel_start_s = 1800.5
        host_memory_reserve_bytes = 0
        [labels]
        rack = "r12"
        """
    )
    config = load_config(file)
    assert config.state_dir == Path("/var/lib/leasehold/worker")
    assert (config.driver_call_floor_s, config.proof_timeout_s) == (12.5, 3.0)
    assert (config.kernel_quiescence_s, config.kernel_start_s) == (600.0, 1800.5)
    assert (config.host_memory_reserve_bytes, config.labels) == (0, {"rack": "r12"})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("state_dir = 5", "not a path"),
        ("driver_call_floor_s = 0", "greater than 0"),
        ("proof_timeout_s = -1", "greater than 0"),
        ("proof_timeout_s = inf", "greater than 0"),
        ("checkpoint_expiry_s = 1e15", "at most 1e\\+09"),
        ("host_memory_reserve_bytes = -1", "is out of range: give 0 to"),
        ('log_level = "loud"', "unknown log level 'loud': give one of debug, info, warning, error"),
    ],
)
def test_a_setting_out_of_range_is_refused(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(text)
    with pytest.raises(StartError, match=match):
        load_config(file)


def test_limits_of_resources_are_bytes_or_sizes(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(
        """
        cpu_limit_millicores = 8000
        memory_limit = "1.5 GiB"
        disk_reserve = 1000
        [gpu_units]
        "H100 PCIe" = 50
        """
    )
    config = load_config(file)
    assert (config.cpu_limit_millicores, config.gpu_units) == (8000, {"H100 PCIe": 50})
    assert (config.memory_limit_bytes, config.disk_reserve_bytes) == (3 * 2**29, 1000)


def test_without_limits_all_of_the_host_may_be_had(tmp_path: Path) -> None:
    config = load_config(None)
    assert (config.cpu_limit_millicores, config.memory_limit_bytes, config.disk_reserve_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "cpu_limit_millicores = -1",
            "cpu_limit_millicores -1 is out of range: give 0 to 9223372036854775807",
        ),
        ("memory_limit = -5", "memory_limit -5 is out of range"),
        (
            "host_memory_reserve_bytes = 9223372036854775808",
            "host_memory_reserve_bytes 9223372036854775808 is out",
        ),
        ('memory_limit = "8G"', "memory_limit: invalid size '8G'"),
        ('disk_reserve = "-1GiB"', "disk_reserve: invalid size '-1GiB'"),
        ("disk_reserve = 1.5", "expected a whole number or text, got a number"),
        ("[gpu_units]\nH100 = 0", "gpu_units of 'H100' are 0"),
        ('[gpu_units]\n"" = 5', "name a part"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(text)
    with pytest.raises(StartError, match=match):
        load_config(file)


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_settings_file_is_a_regular_file_of_bounded_size(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "worker.toml"
    make_unreadable(file, kind)
    rule = "larger than the limit of 1000000 bytes" if kind == "large" else "not a regular file"
    with pytest.raises(StartError, match=f"{file} can't be read: {rule}; give another with --config"):
        load_config(file)


def test_an_enrolment_gives_name_and_coordinator_unless_others_are_given(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    write_enrolment(tmp_path, Enrolment(identity="worker/gpu-07", coordinator="c:7401"))
    file = tmp_path / "worker.toml"
    file.write_text(f'state_dir = "{tmp_path}"\n')
    config = load_config(file)
    assert (config.name, config.coordinator) == ("gpu-07", "c:7401")
    assert load_config(file, "gpu-08").name == "gpu-08", "the token is newer"
    given = load_config(file, "gpu-08", name="gpu-09", coordinator="d:1")
    assert (given.name, given.coordinator) == ("gpu-09", "d:1")


def test_a_join_token_comes_from_standard_input_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("leasehold-join-x\nmore\n"))
    assert daemon._join_token("-", None) == "leasehold-join-x\n"
    (tmp_path / "token").write_text("leasehold-join-y")
    assert daemon._join_token(None, tmp_path / "token") == "leasehold-join-y"
    assert capsys.readouterr().err == ""
    assert daemon._join_token("leasehold-join-z", None) == "leasehold-join-z"
    assert "can see a token in an argument" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "token")  # as mounted secrets are
    assert daemon._join_token(None, tmp_path / "link") == "leasehold-join-y"
    for join, file in (("-", tmp_path), (None, tmp_path / "none")):
        with pytest.raises(StartError):
            daemon._join_token(join, file)


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_join_token_in_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    make_unreadable(tmp_path / "token", kind)
    with pytest.raises(StartError, match="is not a regular file: write the join token into one"):
        daemon._join_token(None, tmp_path / "token")


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "leasehold-join-", "leasehold-join-!!", "leasehold-join-AAAA", "leasehold-join-AAAAA"],
)
def test_what_is_no_join_token_is_told(text: str) -> None:
    problem = "it is incomplete or damaged" if text.startswith("leasehold") else "it does not begin with"
    with pytest.raises(StartError, match=rf"is no join token \({problem}"):
        read_ticket(text)
