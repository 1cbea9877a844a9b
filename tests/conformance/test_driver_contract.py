"""The driver's checkpoint contract: one suite, for the simulated driver and for NVIDIA's.

The first group restates the scenarios of cuda.core's own checkpoint tests, the second those of NVIDIA's
sample programs; the third holds what the worker relies on beyond them. Every scenario is a function of
`scenarios.py` that drives a real CUDA process.
"""

from __future__ import annotations

import pytest

from tests.grids import grid

from .conftest import DriverHost

CUDA_CORE = (
    "a_bool_is_no_pid",
    "a_text_is_no_pid",
    "zero_is_no_pid",
    "a_negative_number_is_no_pid",
    "a_negative_timeout_is_refused",
    "a_map_that_is_no_mapping_is_refused",
    "the_initial_state_is_running",
    "the_restore_thread_id_is_positive",
    "lock_and_unlock",
    "lock_with_a_timeout",
    "full_cycle_without_migration",
    "a_rotation_migrates_the_context",
    "two_identical_gpus_swap",
)

NVIDIA_SAMPLES = (
    "a_lock_waits_for_submitted_work_until_its_timeout",
    "several_processes_are_suspended_together",
    "a_process_moves_itself",
)

WORKER = (
    "a_process_without_cuda_is_not_initialized",
    "a_missing_process_is_an_error_of_the_operating_system",
    "a_zombie_is_not_initialized",
    "calls_in_the_wrong_state_are_illegal_and_change_nothing",
    "device_calls_wait_and_data_survives",
    "the_restore_thread_belongs_to_the_target",
    "a_thread_id_names_its_process",
    "nvml_follows_the_state",
    "an_incomplete_map_is_refused_and_changes_nothing",
    "a_map_with_an_unknown_gpu_is_refused_and_changes_nothing",
    "an_identity_map_is_accepted",
    "a_gpu_that_is_visible_twice_is_an_invalid_device",
)


IN_SHORT = (
    "a_process_without_cuda_is_not_initialized",
    "a_missing_process_is_an_error_of_the_operating_system",
    "calls_in_the_wrong_state_are_illegal_and_change_nothing",
    "device_calls_wait_and_data_survives",
    "nvml_follows_the_state",
    "an_incomplete_map_is_refused_and_changes_nothing",
    "an_identity_map_is_accepted",
)
"""Scenarios of the third group that are not long."""


@pytest.mark.parametrize("scenario", grid(CUDA_CORE, *CUDA_CORE[8:]))
def test_cuda_core(driver_host: DriverHost, scenario: str) -> None:
    driver_host.run(scenario)


@pytest.mark.parametrize("scenario", grid(NVIDIA_SAMPLES, *NVIDIA_SAMPLES[1:]))
def test_nvidia_samples(driver_host: DriverHost, scenario: str) -> None:
    driver_host.run(scenario)


@pytest.mark.parametrize("scenario", grid(WORKER, *IN_SHORT))
def test_worker(driver_host: DriverHost, scenario: str) -> None:
    driver_host.run(scenario)
