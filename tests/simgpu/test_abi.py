"""What simgpu states of the APIs itself, against cuda-bindings, nvidia-ml-py and the C compiler."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pynvml
from cuda.bindings import driver
from leasehold_simgpu import layout
from leasehold_simgpu.libraries import SOURCES

MEMBERS = {
    name: int(member)
    for kind in vars(driver).values()
    if isinstance(kind, type)
    for name, member in getattr(kind, "__members__", {}).items()
}


def compile_and_run(tmp_path: Path, source: str) -> str:
    """What a C program prints that is compiled against simgpu's headers."""
    (tmp_path / "program.c").write_text(source)
    program = tmp_path / "program"
    command = ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-I", str(SOURCES), "-o", str(program), "program.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout


def test_python_and_c_lay_the_state_file_out_alike(tmp_path: Path) -> None:
    structs = {"gpu": layout.Gpu, "fault": layout.Fault, "process": layout.Process, "host": layout.Host}
    lines = []
    expected = []
    for name, struct in structs.items():
        lines.append(f'printf("{name} %zu\\n", sizeof(struct simgpu_{name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof(struct simgpu_{name}, {field}));')
            expected.append(f"{name}.{field} {getattr(struct, field).offset}")
    for name in (
        "MAGIC",
        "MAX_GPUS",
        "MAX_PROCESSES",
        "MAX_FAULTS",
        "XIDS_KEPT",
        "NO_STATE",
        "UNLIMITED",
        "STATE_MASK",
    ):
        lines.append(f'printf("{name} %lld\\n", (long long)SIMGPU_{name});')
        expected.append(f"{name} {getattr(layout, name)}")
    for name in ("RESIDENT", "WEDGED", "GATE_CLOSED", "PLACEMENT"):
        lines.append(f'printf("{name} %u\\n", SIMGPU_{name});')
        expected.append(f"{name} {getattr(layout, name)}")
    for value, name in enumerate((*layout.CHECKPOINT_CALLS, "checkpoint_calls")):
        lines.append(f'printf("{name} %d\\n", SIMGPU_{name.upper()});')
        expected.append(f"{name} {value}")
    headers = '#include <stddef.h>\n#include <stdio.h>\n#include "host/state.h"\n'
    printed = compile_and_run(tmp_path, headers + "int main(void) {" + "\n".join(lines) + "}")
    assert printed.split("\n")[:-1] == expected


def test_every_value_of_the_driver_is_that_of_cuda_bindings() -> None:
    stated = re.findall(r"\b(CU_\w+) = (\d+)", (SOURCES / "api/driver_types.h").read_text())
    assert len(stated) > 50
    assert {name: int(value) for name, value in stated} == {name: MEMBERS.get(name) for name, _ in stated}


def test_every_error_of_cuda_bindings_is_known() -> None:
    stated = re.findall(r"X\((CUDA_\w+), (\d+),", (SOURCES / "api/cuda_errors.h").read_text())
    assert {name: int(value) for name, value in stated} == {
        error.name: int(error) for error in driver.CUresult
    }


def test_every_error_of_nvml_is_that_of_nvidia_ml_py() -> None:
    stated = re.findall(r"X\((NVML_\w+), (\d+),", (SOURCES / "api/nvml_types.h").read_text())
    known = {name: getattr(pynvml, name, None) for name, _ in stated}
    assert {name: int(value) for name, value in stated} == known


def test_structs_have_the_sizes_that_the_api_fixes(tmp_path: Path) -> None:
    sizes = {
        "CUcheckpointLockArgs": 64,
        "CUcheckpointCheckpointArgs": 64,
        "CUcheckpointRestoreArgs": 64,
        "CUcheckpointUnlockArgs": 64,
        "CUcheckpointGpuPair": 32,
        "CUuuid": 16,
        "CUmemPoolProps": 88,
        "nvmlMemory_t": ctypes.sizeof(pynvml.c_nvmlMemory_t),
        "nvmlMemory_v2_t": ctypes.sizeof(pynvml.c_nvmlMemory_v2_t),
        "nvmlUtilization_t": ctypes.sizeof(pynvml.c_nvmlUtilization_t),
        "nvmlPciInfo_t": ctypes.sizeof(pynvml.nvmlPciInfo_t),
        "nvmlProcessInfo_t": ctypes.sizeof(pynvml.c_nvmlProcessInfo_v3_t),
        "nvmlEventData_t": ctypes.sizeof(pynvml.c_nvmlEventData_t),
    }
    lines = "\n".join(f'printf("%zu\\n", sizeof({name}));' for name in sizes)
    headers = '#include <stdio.h>\n#include "api/driver_types.h"\n'
    headers += '#undef EXPORT\n#include "api/nvml_types.h"\n'
    printed = compile_and_run(tmp_path, headers + "int main(void) {" + lines + "}")
    assert dict(zip(sizes, map(int, printed.split()), strict=True)) == sizes


def test_fields_are_where_cuda_bindings_writes_them() -> None:
    lock = driver.CUcheckpointLockArgs()
    lock.timeoutMs = 0x11223344
    assert ctypes.string_at(lock.getPtr(), 64) == b"\x44\x33\x22\x11" + bytes(60)

    pair = driver.CUcheckpointGpuPair()
    old, new = (ctypes.create_string_buffer(bytes([fill]) * 16, 16) for fill in (1, 2))
    pair.oldUuid = driver.CUuuid(ctypes.addressof(old))
    pair.newUuid = driver.CUuuid(ctypes.addressof(new))
    assert ctypes.string_at(pair.getPtr(), 32) == b"\x01" * 16 + b"\x02" * 16

    restore = driver.CUcheckpointRestoreArgs()
    restore.gpuPairs = [pair]
    restore.gpuPairsCount = 5
    raw = ctypes.string_at(restore.getPtr(), 64)
    address = int.from_bytes(raw[:8], "little")
    assert ctypes.string_at(address, 32) == b"\x01" * 16 + b"\x02" * 16
    assert raw[8:] == b"\x05" + bytes(55)

    properties = driver.CUmemPoolProps()
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 3
    raw = ctypes.string_at(properties.getPtr(), 16)
    assert raw[8:] == b"\x01\0\0\0\x03\0\0\0"
