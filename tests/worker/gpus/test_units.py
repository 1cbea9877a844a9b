"""Throughput units of GPU models."""

import logging

import pytest
from leasehold_worker.gpus.units import DEFAULT_UNITS, GpuUnits


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("GeForce GTX 1080 Ti", 2),
        ("Tesla K80", 2),
        ("Tesla P40", 4),
        ("Tesla P100-PCIE-16GB", 8),
        ("Tesla V100-SXM2-32GB", 16),
        ("NVIDIA A100-SXM4-40GB", 24),
        ("NVIDIA A100-SXM4-80GB", 28),
        ("NVIDIA A100 80GB PCIe", 28),
        ("NVIDIA A10", 10),
        ("NVIDIA A10G", 10),
        ("NVIDIA L4", 8),
        ("NVIDIA L40S", 24),
        ("NVIDIA H100 80GB HBM3", 72),
        ("NVIDIA H100 PCIe", 52),
        ("NVIDIA H200", 80),
        ("NVIDIA GH200 480GB", 80),
        ("NVIDIA B200", 160),
    ],
)
def test_the_longest_part_of_a_name_decides(name: str, units: int) -> None:
    assert GpuUnits().of(name) == units


def test_a_part_is_made_of_whole_words() -> None:
    units = GpuUnits({"T4": 99, "A10": 98})
    assert units.of("NVIDIA T400 4GB") == 1
    assert units.of("NVIDIA A100-SXM4-40GB") == 24
    assert units.of("tesla t4") == 99


def test_what_is_configured_goes_before_the_default_table() -> None:
    units = GpuUnits({"H100": 5, "h100 nvl": 6, "Quantum 9": 7})
    assert units.of("NVIDIA H100 PCIe") == 5, "though a longer part matches in the default table"
    assert units.of("NVIDIA H100 NVL") == 6
    assert units.of("NVIDIA Quantum 9 Ultra") == 7
    assert units.of("NVIDIA H200") == DEFAULT_UNITS["H200"]


def test_an_unknown_model_counts_one_and_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    units = GpuUnits()
    with caplog.at_level(logging.WARNING):
        assert [units.of("NVIDIA Quantum 9") for _ in range(3)] == [1, 1, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "GPU model 'NVIDIA Quantum 9' has no known throughput units and counts as 1: set them under gpu_units"
    ]


def test_no_model_counts_nothing() -> None:
    assert all(units >= 1 for units in DEFAULT_UNITS.values())
