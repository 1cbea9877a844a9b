"""``leasehold top`` with a real coordinator and a worker on a simulated host."""

import asyncio

import pytest

from tests.client.top.scripted_fleet import opened

from .fleets import Fleet
from .mutual_tls import variables_set


@pytest.mark.long
def test_a_workload_is_parked_moved_and_restored_across_a_restart(fleet: Fleet) -> None:
    fleet.run_counter("one")

    async def main() -> None:
        async with opened(fleet.address, width=120) as page:
            await page.shows("1 host | 4 GPUs: 3 free, 1 leased", "# leased    one")
            await page.press("down", "m")
            await page.shows("Move one from alpha/0")
            await page.press("down", "enter")
            await page.shows("pair alpha/0 -> alpha/1", "y remap")
            await page.press("y")
            await page.shows("connected    .#..", "remap SUCCEEDED")
            await page.press("s")
            await page.shows("one: suspend would move", "it releases alpha/1")
            await page.press("y")
            await page.shows("P suspended    one", "in host memory", "suspend SUCCEEDED")
            await asyncio.to_thread(fleet.kill_coordinator)
            await page.shows("COORDINATOR AWAY", "P suspended    one")
            await asyncio.to_thread(fleet.start_coordinator)
            await page.until(lambda: page.part("connection").startswith("live"))
            await page.shows("connected    ....", "P suspended    one")
            await page.press("end", "r")
            await page.shows("one: restore would move", "y restore")
            await page.press("y")
            await page.shows("restore SUCCEEDED", "# leased    one")

    with variables_set(fleet.variables):
        asyncio.run(main())
    fleet.wait_counting("one")
