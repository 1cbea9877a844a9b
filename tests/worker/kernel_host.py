"""A worker in the test's own process, which serves its local socket to real applications with kernels."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import trio
from leasehold_worker.agent.assembly import Parts, open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.applications.application import Application
from leasehold_worker.applications.registry import ApplicationRegistry
from leasehold_worker.checkpoints.application_store import ApplicationStore
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal import open_journal
from leasehold_worker.local_api.claim_waiting import ClaimWaiting
from leasehold_worker.local_api.claims import LocalClaims
from leasehold_worker.local_api.queries import LocalQueries
from leasehold_worker.local_api.service import serve_locally
from leasehold_worker.local_api.unix_socket import LocalSocket
from leasehold_worker.workloads.states import ENDED

from .kernel_programs import THREADS

SIZE = 3_500_000


@dataclass
class ServingProgram:
    """A program that serves a kernel."""

    process: subprocess.Popen[bytes]
    output: Path

    def said(self) -> list[str]:
        return self.output.read_text().splitlines()

    async def wait_line(self, start: str) -> str:
        """Waits until it has said something that begins so."""
        with trio.fail_after(20):
            while True:
                for line in self.said():
                    if line.startswith(start):
                        return line
                await trio.sleep(0.01)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()


@dataclass
class Served:
    """A worker in this process, and the applications that it may call."""

    folder: Path
    parts: Parts
    applications: ApplicationRegistry
    store: ApplicationStore
    started: list[ServingProgram] = field(default_factory=list)

    def start(self, program: str, mode: str = "", size: int = SIZE, version: int = 1) -> ServingProgram:
        return self.start_command(sys.executable, "-c", program, mode, str(size), str(version))

    def start_command(self, *command: str) -> ServingProgram:
        output = self.folder / f"application{len(self.started)}.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LEASEHOLD_SOCKET": str(self.folder / "worker.sock")},
            )
        self.started.append(ServingProgram(process, output))
        return self.started[-1]

    async def serve(
        self, mode: str = "", size: int = SIZE, version: int = 1, program: str = THREADS
    ) -> tuple[ServingProgram, Application]:
        """Starts an application that begins afresh."""
        application = self.start(program, mode, size, version)
        await application.wait_line("begun")
        return application, self.kernel()

    def kernel(self) -> Application:
        (workload,) = (found for found in self.parts.workloads.all() if found.state not in ENDED)
        kernel = self.applications.of(workload.workload_id)
        assert kernel is not None
        return kernel

    async def restored(
        self, mode: str = "", version: int = 1, program: str = THREADS
    ) -> tuple[ServingProgram, Application]:
        """Starts an application that is told to wait until it is restored."""
        known = {workload.workload_id for workload in self.parts.workloads.all()}
        application = self.start(program, mode, 1, version)
        with trio.fail_after(20):
            while not (new := [w for w in self.parts.workloads.all() if w.workload_id not in known]):
                await self.parts.workloads.wait_changed()
        self.applications.expect_restore(new[0].workload_id)
        return application, await self.applications.wait_served(new[0].workload_id, 20)

    async def end(self, application: ServingProgram) -> None:
        """Ends an application, as a stop would, and waits until its workload has ended."""
        application.process.kill()
        with trio.fail_after(20):
            for workload in self.parts.workloads.all():
                await workload.ended.wait()

    def clear(self) -> None:
        """Ends the applications."""
        for application in self.started:
            application.process.kill()
            application.process.wait(10)
            assert application.process.stdin is not None
            application.process.stdin.close()

    def files(self) -> list[str]:
        return sorted(path.name for path in self.store.root.rglob("*") if path.is_file())


@asynccontextmanager
async def open_served(folder: Path) -> AsyncIterator[Served]:
    """A worker in this process."""
    async with (
        open_journal(folder / "journal.sqlite3") as journal,
        open_parts(WorkerConfig(state_dir=folder), folder / "workloads", lambda _: None) as parts,
    ):
        commands = Commands(
            parts.operations.perform, journal, lambda _: [], None, parts.nursery, lambda _: None
        )
        claim_waiting = ClaimWaiting(parts.pool, parts.resources, parts.workloads, parts.foreign)
        claims = LocalClaims(
            parts.workloads,
            parts.exit_monitor.add,
            parts.programs,
            parts.host_shares,
            parts.nursery,
            commands,
            journal,
            claim_waiting,
        )
        answers = LocalQueries(
            parts.pool, parts.resources, parts.workloads, commands, claim_waiting, "worker"
        )
        applications = ApplicationRegistry(parts.workloads, parts.nursery)
        with closing(LocalSocket(folder / "worker.sock", "")) as local_socket:
            world = Served(folder, parts, applications, ApplicationStore(folder / "images"))
            async with serve_locally(local_socket, claims, answers, applications):
                try:
                    yield world
                finally:
                    claims.suspend_streams()
                    world.clear()
            # Ends of claims are commands: those that have begun are seen through.
            with trio.fail_after(20):
                for workload in parts.workloads.all():
                    await workload.ended.wait()
                commands.close()
                await commands.wait_finished()
