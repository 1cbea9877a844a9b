"""Certificates and blocks by the command line."""

import json

from leasehold.v1 import certificate_service_pb2
from leasehold.v1.certificate_service_pb2 import (
    Authority,
    Block,
    BlockIdentityRequest,
    Certificate,
    RetireAuthorityRequest,
    RevokeCertificateRequest,
    UnblockIdentityRequest,
)

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator


def test_a_serial_is_revoked_and_a_name_is_blocked(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    scripted.answers["RevokeCertificate"] = lambda request, context: (
        certificate_service_pb2.RevokeCertificateResponse(serials=[request.serial, "cd"])
    )
    done = leasehold("ca", "revoke", "ab")
    assert (done.code, done.stdout) == (0, "ab: revoked\ncd: revoked\n")
    assert [one.serial for one in scripted.asked(RevokeCertificateRequest)] == ["ab"]
    scripted.answers["BlockIdentity"] = lambda request, context: (
        certificate_service_pb2.BlockIdentityResponse(block=Block(identity=request.identity))
    )
    assert leasehold("ca", "revoke", "user/ann").stdout == "user/ann: blocked\n"
    assert [one.identity for one in scripted.asked(BlockIdentityRequest)] == ["user/ann"]
    scripted.answers["UnblockIdentity"] = lambda request, context: (
        certificate_service_pb2.UnblockIdentityResponse()
    )
    assert leasehold("ca", "unblock", "user/ann").stdout == "user/ann: unblocked\n"
    assert [one.identity for one in scripted.asked(UnblockIdentityRequest)] == ["user/ann"]
    told = leasehold("ca", "unblock", "worker/alpha").stdout
    until = "the worker connects within a minute if its certificate is valid (`leasehold ca list`)"
    assert told.startswith(f"worker/alpha: unblocked; {until} and the CA was not rotated meanwhile; ")
    assert told.endswith("`leasehold token create --worker alpha --replace`\n")


def test_certificates_and_blocks_are_listed(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    certificate = Certificate(
        serial="ab", identity="user/ann", state=certificate_service_pb2.CERTIFICATE_STATE_VALID, call_count=3
    )
    scripted.answers["ListCertificates"] = lambda request, context: (
        certificate_service_pb2.ListCertificatesResponse(certificates=[certificate])
    )
    scripted.answers["ListBlocks"] = lambda request, context: certificate_service_pb2.ListBlocksResponse(
        blocks=[Block(identity="user/ann", blocked_by="local/root")]
    )
    authority = Authority(serial="ca", signs_clients=True, waiting_count=3, waiting=["worker/a"])
    scripted.answers["ListAuthorities"] = lambda request, context: (
        certificate_service_pb2.ListAuthoritiesResponse(authorities=[authority])
    )
    lines = leasehold("ca", "list").stdout.splitlines()
    assert lines[1].split()[:2] == ["ca", "clients"]
    assert lines[1].endswith("worker/a,2 more")
    assert lines[4].split()[:3] == ["ab", "user/ann", "VALID,blocked"]
    assert lines[4].split()[-2:] == ["3", "-"]
    assert lines[7].split()[0] == "user/ann"
    listed = json.loads(leasehold("ca", "list", "-o", "json").stdout)
    assert (listed["certificates"][0]["serial"], listed["blocks"][0]["blocked_by"]) == ("ab", "local/root")


def test_the_authority_is_rotated(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.answers["RotateAuthority"] = lambda request, context: (
        certificate_service_pb2.RotateAuthorityResponse(authority=Authority(serial="cb"))
    )
    assert leasehold("ca", "rotate").stdout == "cb: added; it signs from now on\n"
    scripted.answers["RetireAuthority"] = lambda request, context: (
        certificate_service_pb2.RetireAuthorityResponse()
    )
    assert leasehold("ca", "retire", "ca").stdout == "ca: retired\n"
    leasehold("ca", "retire", "ca", "--force")
    assert [one.force for one in scripted.asked(RetireAuthorityRequest)] == [False, True]
