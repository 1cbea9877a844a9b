"""Trains a PyTorch model on a GPU of this host, and gives the GPU to others between epochs.

    python yielding_training.py --epochs 100

The claim is preemptible. When another claim waits for the GPU, the loop pauses at the end of an epoch, and
the worker suspends the process after the grace period. The worker restores the process as soon as a GPU is
free, and the loop continues. Nothing is lost. Needs PyTorch with CUDA, and a worker on this host.
"""

import argparse
import sys
from collections.abc import Iterator

from google.protobuf.duration_pb2 import Duration
from leasehold.v1.workload_pb2 import HelperTerms
from leasehold_client import local

try:
    import torch
except ModuleNotFoundError as missing:
    sys.exit(f"this example needs PyTorch with CUDA ({missing}): install it, as by `pip install torch`")

FEATURES, BATCH, STEPS = 64, 256, 100
PAUSE_S = 0.1


def epochs(count: int, lease: local.LocalLease) -> Iterator[int]:
    """Yields the numbers of epochs. Pauses before each one while another claim waits for the GPU."""
    for epoch in range(count):
        # Until the worker has suspended and restored this process, or the other claim is gone.
        while lease.yield_requested.is_set() and not lease.ended.wait(PAUSE_S):
            pass
        if lease.ended.is_set():
            sys.exit("the lease has ended: see the log of the worker")
        yield epoch


def train(count: int, lease: local.LocalLease) -> None:
    """Trains, and prints the loss of each epoch."""
    model = torch.nn.Linear(FEATURES, 1).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in epochs(count, lease):
        for _ in range(STEPS):
            inputs = torch.randn(BATCH, FEATURES, device="cuda")
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f} on {lease.gpu_uuids[0]}", flush=True)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Train, and give the GPU to others between epochs.")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--grace-s", type=int, default=30, help="about the time of an epoch")
    options = parser.parse_args()
    terms = HelperTerms(grace=Duration(seconds=options.grace_s))
    with local.claim(gpus=1, name="training", helper=terms) as lease:
        train(options.epochs, lease)


if __name__ == "__main__":
    main()
