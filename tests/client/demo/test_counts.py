"""What a counter's output proves, and what it doesn't hide."""

from leasehold_client.demo.counts import CounterReport, read_counter


def lines(*counts: int, gpu: str = "GPU-a") -> str:
    return "".join(f"count={count} gpu={gpu} ok\n" for count in counts)


def test_consecutive_counts_are_whole() -> None:
    assert read_counter(lines(1, 2, 3)) == CounterReport(3, 0, 0, ("GPU-a",))


def test_the_gpus_are_told_in_order() -> None:
    text = lines(1) + lines(2, 3, gpu="GPU-b") + lines(4)
    assert read_counter(text).gpu_uuids == ("GPU-a", "GPU-b", "GPU-a")


def test_a_gap_a_repetition_and_a_restart_are_lost_counts() -> None:
    assert read_counter(lines(1, 3)).lost == 1
    assert read_counter(lines(1, 1)).lost == 1
    assert read_counter(lines(7, 8, 1)).lost == 1


def test_whatever_is_no_good_count_is_corrupt() -> None:
    assert read_counter(lines(1) + "count=2 gpu=GPU-a corrupt at byte 7\n").corrupt == 1
    assert read_counter("Traceback (most recent call last):\n").corrupt == 1


def test_a_line_that_is_being_written_does_not_count() -> None:
    assert read_counter(lines(1) + "count=2 gpu=GP") == CounterReport(1, 0, 0, ("GPU-a",))
    assert read_counter("") == CounterReport(0, 0, 0, ())
