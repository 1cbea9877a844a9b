"""The two services: their units, users, directories and settings. Nothing here reads or writes."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROGRAM: Final = "/opt/leasehold/bin/leasehold"
"""The program in the units of deploy/systemd."""

SETTINGS_DIRECTORY: Final = Path("/etc/leasehold")
UNIT_DIRECTORY: Final = Path("/etc/systemd/system")
STATE_DIRECTORY: Final = Path("/var/lib/leasehold")


@dataclass(frozen=True, slots=True)
class Service:
    """A daemon as a service of systemd.

    Attributes:
        name: The verb that runs the daemon.
        user: Its Unix user.
    """

    name: str
    user: str

    @property
    def unit(self) -> str:
        """The name of its unit."""
        return f"leasehold-{self.name}.service"

    @property
    def comment(self) -> str:
        """The comment of the Unix user, by which an uninstallation knows a user that was made for it."""
        return f"Leasehold {self.name}"

    @property
    def unit_path(self) -> Path:
        """The file of the unit."""
        return UNIT_DIRECTORY / self.unit

    @property
    def settings_path(self) -> Path:
        """The file of settings, where the daemon looks for it."""
        return SETTINGS_DIRECTORY / f"{self.name}.toml"

    @property
    def state_directory(self) -> Path:
        """Where the daemon keeps its state."""
        return STATE_DIRECTORY / self.name

    @property
    def socket(self) -> Path:
        """The socket, where the command line looks for it."""
        return Path(f"/run/leasehold/{self.name}/{self.name}.sock")


DEFAULT_USERS: Final[Mapping[str, str]] = {"coordinator": "leasehold", "worker": "leasehold-worker"}


def unit_text(template: str, program: Path, user: str) -> str:
    """The text of a unit.

    Args:
        template: The unit of deploy/systemd.
        program: The ``leasehold`` program.
        user: The Unix user of the daemon.
    """
    text = template.replace(f"ExecStart={PROGRAM} ", f"ExecStart={program} ")
    return re.sub(r"(?m)^User=.*$", f"User={user}", text)


def settings_text(service: Service, chosen: Mapping[str, str]) -> str:
    """The text of a new file of settings.

    Args:
        service: The service.
        chosen: Further settings by name.
    """
    settings = {"state_dir": str(service.state_directory), "socket": str(service.socket), **chosen}
    # A JSON string of characters without control characters is a TOML string too.
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in settings.items()]
    return f"# Settings of `leasehold {service.name}`, from its installation.\n" + "".join(lines)
