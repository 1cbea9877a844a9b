"""JSON documents of messages."""

from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.worker_pb2 import Capability, HostFacts
from leasehold_client.display.documents import to_dict


def test_a_document_has_zeros_and_lacks_the_unknown() -> None:
    gpu = to_dict(Gpu(uuid="GPU-1", slot=0, memory_total_bytes=0))
    assert (gpu["slot"], gpu["memory_total_bytes"]) == (0, "0")
    assert "numa_node" not in gpu
    assert to_dict(Capability(name="cuda_suspend", available=False))["available"] is False
    assert "cpu_count" not in to_dict(HostFacts(hostname="host-1"))
