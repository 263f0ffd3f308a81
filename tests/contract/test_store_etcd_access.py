"""Who may speak with etcd, and whom we believe: certificates of both ends, and users with passwords."""

import contextlib
import datetime
import ipaddress
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from podwire.model.config import StoreSettings
from podwire.model.errors import InvalidConfiguration, Unavailable
from podwire.model.store import StoreEvent
from podwire.store.etcd import gateway
from podwire.store.etcd.access import parse_endpoints, read_password
from podwire.store.open import StoreAccess, open_store, read_environment
from tests.contract.etcd_rig import Etcd, require
from tests.contract.stores import DEADLINE_S, key, make, now_at, seen, take
from tests.fakes.leases import leases_of
from tests.fakes.store import since

PASSWORD = "c0rrect horse"
USER = "podwire"


class Authority:
    """Signs certificates; files are in `directory`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.path = directory / f"{name}.pem"
        made = self._begin(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        made = made.add_extension(usage, critical=True)
        self.path.write_bytes(_pem(made.sign(self._key, hashes.SHA256())))

    def issue(self, name: str, address: str = "127.0.0.1") -> tuple[Path, Path]:
        """Make a certificate for an address, and its key."""
        private = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        purposes = x509.ExtendedKeyUsage(
            [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        )
        made = self._begin(subject, private).add_extension(names, critical=False)
        signed = made.add_extension(purposes, critical=False).sign(self._key, hashes.SHA256())
        certificate, file = (self._directory / f"{name}.{end}" for end in ("crt", "key"))
        certificate.write_bytes(_pem(signed))
        file.write_bytes(
            private.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return certificate, file

    def _begin(
        self, subject: x509.Name, private: ec.EllipticCurvePrivateKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        known = x509.SubjectKeyIdentifier.from_public_key(private.public_key())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(private.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(known, critical=False)
            .add_extension(issuer, critical=False)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def tls_etcd(tmp_path: Path, authority: Authority) -> Iterator[Etcd]:
    """An etcd that wants a certificate of the authority from its clients."""
    require()
    certificate, private = authority.issue("server")
    flags = [
        *("--cert-file", str(certificate), "--key-file", str(private)),
        *("--client-cert-auth", "--trusted-ca-file", str(authority.path)),
    ]
    server = Etcd(tmp_path, flags, scheme="https")
    server.context = ssl.create_default_context(cafile=str(authority.path))
    server.context.load_cert_chain(certificate, private)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    return path


@pytest.fixture
def guarded_etcd(own_etcd: Etcd) -> Etcd:
    """An etcd that asks who we are. Our user may do all under /podwire/, and nothing else."""
    for user in ("root", USER, "stranger"):
        own_etcd.ask("auth/user/add", {"name": user, "password": PASSWORD})
    own_etcd.ask("auth/role/add", {"name": "root"})
    own_etcd.ask("auth/user/grant", {"user": "root", "role": "root"})
    own_etcd.ask("auth/role/add", {"name": "podwire"})
    all_of_ours = {"permType": "READWRITE", "key": "L3BvZHdpcmUv", "range_end": "L3BvZHdpcmUw"}
    own_etcd.ask("auth/role/grant", {"name": "podwire", "perm": all_of_ours})
    own_etcd.ask("auth/user/grant", {"user": USER, "role": "podwire"})
    own_etcd.ask("auth/enable", {})
    found = own_etcd.ask("auth/authenticate", {"name": "root", "password": PASSWORD})
    own_etcd.token = found["token"]
    return own_etcd


def change_password(etcd: Etcd, password: str) -> None:
    """Give our user another password; etcd forgets its tokens then."""
    etcd.ask("auth/user/changepw", {"name": USER, "password": password})


def access_of(authority: Authority, name: str = "client") -> StoreAccess:
    certificate, private = authority.issue(name)
    return StoreAccess(ca=str(authority.path), cert=str(certificate), key=str(private))


# ------------------------------------------------------------------ certificates


def test_with_certificates_of_both_ends_everything_works(
    tls_etcd: Etcd, authority: Authority
) -> None:
    with closing(open_store(f"etcd://{tls_etcd.endpoint}", access=access_of(authority))) as store:
        with store.watch(since(now_at(store))) as watch:
            made = store.create(make("a"))
            assert seen(take(watch, 1)) == [("a", False)]
        assert store.list("networkpolicies")[0] == [made]
        leases_of(store).acquire("duty", "a", 5).close()


def test_a_store_without_our_certificate_is_refused(tls_etcd: Etcd, authority: Authority) -> None:
    access = StoreAccess(ca=str(authority.path))
    with pytest.raises(InvalidConfiguration, match=tls_etcd.endpoint) as caught:
        open_store(f"etcd://{tls_etcd.endpoint}", access=access)
    assert "etcd_cert" in caught.value.hint


def test_an_authority_that_we_do_not_know_is_not_believed(
    tls_etcd: Etcd, authority: Authority, tmp_path: Path
) -> None:
    access = StoreAccess(ca=str(Authority(tmp_path, "other").path))
    with pytest.raises(InvalidConfiguration, match="not trusted") as caught:
        open_store(f"etcd://{tls_etcd.endpoint}", access=access)
    assert tls_etcd.endpoint in caught.value.message


def test_a_certificate_for_another_address_is_not_believed(
    tls_etcd: Etcd, authority: Authority
) -> None:
    port = tls_etcd.endpoint.split(":")[1]
    with pytest.raises(InvalidConfiguration, match=r"not trusted.*'localhost'"):
        open_store(f"etcd://localhost:{port}", access=access_of(authority))


def test_tls_to_an_etcd_without_it_is_away(own_etcd: Etcd, authority: Authority) -> None:
    """It ends the connection without a word."""
    access = access_of(authority)
    with (
        closing(open_store(f"etcd://{own_etcd.endpoint}", access=access)) as store,
        pytest.raises(Unavailable, match=own_etcd.endpoint),
    ):
        store.get(key("a"))


def test_no_tls_to_an_etcd_that_wants_it_is_away(tls_etcd: Etcd) -> None:
    with (
        closing(open_store(f"etcd://{tls_etcd.endpoint}")) as store,
        pytest.raises(Unavailable, match=tls_etcd.endpoint),
    ):
        store.get(key("a"))


def test_renewed_certificates_are_used_after_a_break(tls_etcd: Etcd, authority: Authority) -> None:
    access = access_of(authority)
    with closing(open_store(f"etcd://{tls_etcd.endpoint}", access=access)) as store:
        made = store.create(make("a"))
        authority.issue("client")
        tls_etcd.kill()
        with pytest.raises(Unavailable):
            store.get(made.key)
        tls_etcd.start()
        assert store.get(made.key) == made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ca": "/nowhere/ca.pem"}, "/nowhere/ca.pem"),
        ({"cert": "/nowhere/c.pem"}, "needs its key"),
        ({"cert": "/nowhere/c.pem", "key": "/nowhere/c.key"}, r"/nowhere/c.pem, /nowhere/c.key"),
        ({"user": "x"}, "needs a password"),
        ({"user": "x", "password_file": "/nowhere/p"}, "'x' from /nowhere/p"),
    ],
    ids=["no such authority", "no key", "no such certificate", "no password", "no such file"],
)
def test_files_that_cannot_be_used_are_named(given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        open_store("etcd://127.0.0.1:1", access=StoreAccess(**given))


def test_an_authority_that_is_none_and_an_empty_password_are_named(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.write_text("\n")
    with pytest.raises(InvalidConfiguration, match=f"authorities for etcd from {path}"):
        open_store("etcd://127.0.0.1:1", access=StoreAccess(ca=str(path)))
    with pytest.raises(InvalidConfiguration, match=f"from {path}: it is empty"):
        open_store("etcd://h:1", access=StoreAccess(user="x", password_file=str(path)))


# ------------------------------------------------------------------ users


def test_a_user_with_a_password_may_do_everything_of_ours(
    guarded_etcd: Etcd, password_file: Path
) -> None:
    access = StoreAccess(user=USER, password_file=str(password_file))
    with closing(open_store(f"etcd://{guarded_etcd.endpoint}", access=access)) as store:
        with store.watch(since(now_at(store))) as watch:
            made = store.create(make("a"))
            assert seen(take(watch, 1)) == [("a", False)]
            store.delete(made.key)
        leases_of(store).acquire("duty", "a", 5).close()


def test_a_new_password_is_read_from_its_file(guarded_etcd: Etcd, password_file: Path) -> None:
    access = StoreAccess(user=USER, password_file=str(password_file))
    with closing(open_store(f"etcd://{guarded_etcd.endpoint}", access=access)) as store:
        made = store.create(make("a"))
        lease = leases_of(store).acquire("duty", "a", 2)
        with store.watch(since(now_at(store))) as watch:
            password_file.write_text("another")
            change_password(guarded_etcd, "another")
            guarded_etcd.kill()
            guarded_etcd.start()
            assert store.get(made.key) == made
            changed = store.update(make("a", 1, revision=made.revision))
            events: list[StoreEvent] = []
            deadline_s = time.monotonic() + DEADLINE_S
            while not events and time.monotonic() < deadline_s:
                try:
                    events += watch.next(0.2)
                except Unavailable:
                    continue
            assert [event.object for event in events] == [changed]
        assert not lease.taken_by
        lease.close()


def test_a_wrong_password_names_user_and_endpoint_and_is_not_tried_on_and_on(
    guarded_etcd: Etcd, password_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[StoreAccess] = []

    def read(access: StoreAccess) -> str:
        tried.append(access)
        return read_password(access)

    monkeypatch.setattr(gateway, "read_password", read)
    access = StoreAccess(user=USER, password_file=str(password_file))
    with closing(open_store(f"etcd://{guarded_etcd.endpoint}", access=access)) as store:
        made = store.create(make("a"))
        change_password(guarded_etcd, "another")
        for _ in range(50):
            with pytest.raises(InvalidConfiguration, match=f"{guarded_etcd.endpoint} .*'{USER}'"):
                store.get(made.key)
        with store.watch(since(made.revision)) as watch:
            with contextlib.suppress(Unavailable):  # etcd ends the stream, and it is opened anew
                watch.next(DEADLINE_S)
            for _ in range(2):
                with pytest.raises(InvalidConfiguration):
                    watch.next(DEADLINE_S)
    assert len(tried) == 2
    with pytest.raises(InvalidConfiguration, match="invalid user ID or password") as caught:
        open_store(f"etcd://{guarded_etcd.endpoint}", access=access)
    assert str(password_file) in caught.value.hint


def test_an_etcd_that_asks_for_a_user_says_so(guarded_etcd: Etcd) -> None:
    with pytest.raises(InvalidConfiguration, match="without a user") as caught:
        open_store(f"etcd://{guarded_etcd.endpoint}")
    assert "etcd_user" in caught.value.hint


def test_a_user_who_may_nothing_is_told_what_he_needs(
    guarded_etcd: Etcd, password_file: Path
) -> None:
    access = StoreAccess(user="stranger", password_file=str(password_file))
    with pytest.raises(InvalidConfiguration, match=r"'stranger': .*permission denied") as caught:
        open_store(f"etcd://{guarded_etcd.endpoint}", access=access)
    assert "/podwire/" in caught.value.hint


def test_a_user_where_nobody_is_asked_is_harmless(own_etcd: Etcd, password_file: Path) -> None:
    access = StoreAccess(user=USER, password_file=str(password_file))
    with closing(open_store(f"etcd://{own_etcd.endpoint}", access=access)) as store:
        assert store.create(make("a")).revision


# ------------------------------------------------------------------ what is written in settings


def test_the_settings_say_how_etcd_is_reached() -> None:
    settings = StoreSettings(
        etcd_ca="a", etcd_cert="b", etcd_key="c", etcd_user="d", etcd_password_file="e"
    )
    assert StoreAccess.of(settings) == StoreAccess("a", "b", "c", "d", "e")
    assert not StoreAccess.of(StoreSettings()).is_encrypted
    variables = {f"PODWIRE_{name.upper()}": value for name, value in vars(settings).items()}
    assert read_environment(variables) == StoreAccess("a", "b", "c", "d", "e")


@pytest.mark.parametrize(
    ("url", "endpoints"),
    [
        ("etcd://h", ("h:2379",)),
        ("etcd://h:1,h:1,[::1]:2,[fd00::1]/", ("h:1", "[::1]:2", "[fd00::1]:2379")),
        ("etcd://a.b-c_d:65535, x:1", ("a.b-c_d:65535", "x:1")),
    ],
)
def test_endpoints_are_read(url: str, endpoints: tuple[str, ...]) -> None:
    assert parse_endpoints(url) == endpoints


@pytest.mark.parametrize(
    "url",
    [
        "etcd://",
        "etcd://h:",
        "etcd://h:0",
        "etcd://h:65536",
        "etcd://h,,x",
        "etcd://u@h",
        "etcd://h/x",
    ],
)
def test_what_is_no_endpoint_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfiguration, match="not HOST:PORT"):
        open_store(url)
