"""The control plane of a cluster: API server, controller manager and scheduler, where the nodes are joined."""

from pathlib import Path
from typing import Final

from podwire.lab.kubernetes import programs, ranges
from podwire.lab.kubernetes.api_server import ApiServer, Shape, User, write_kubeconfig
from podwire.lab.kubernetes.daemon import Daemon, Place

PORT: Final = 6443


class ControlPlane:
    """All programs that are there once; each may be stopped and started again."""

    def __init__(self, directory: Path, *, network: str, families: str, etcd: str) -> None:
        paths = programs.find(programs.CLUSTER)
        self.directory = directory
        self.api = ApiServer(
            directory,
            [User("somebody")],
            Shape(
                address=ranges.of(families)[0].router,
                port=PORT,
                network=network,
                etcd=etcd,
                flags=(f"--service-cluster-ip-range={ranges.join_services(families)}",),
            ),
        )
        place = Place(network=network)
        signing = self.api.authority.make_signing_key("service-accounts")
        self.controllers = Daemon(
            "kube-controller-manager",
            [
                paths["kube-controller-manager"],
                f"--kubeconfig={self.kubeconfig_of('system:kube-controller-manager')}",
                f"--service-account-private-key-file={signing}",
                f"--root-ca-file={self.api.ca}",
                f"--cluster-cidr={ranges.join_pods(families)}",
                *("--allocate-node-cidrs", "--use-service-account-credentials"),
                *("--leader-elect=false", "--bind-address=127.0.0.1"),
            ],
            directory / "kube-controller-manager.log",
            place=place,
        )
        self.scheduler = Daemon(
            "kube-scheduler",
            [
                paths["kube-scheduler"],
                f"--kubeconfig={self.kubeconfig_of('system:kube-scheduler')}",
                *("--leader-elect=false", "--bind-address=127.0.0.1"),
            ],
            directory / "kube-scheduler.log",
            place=place,
        )

    def kubeconfig_of(self, user: str, *groups: str) -> Path:
        """Write the kubeconfig of a program that shows a certificate."""
        name = user.replace(":", "-")
        pair = self.api.authority.issue_client(name, user, groups)
        credentials = {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}
        path = self.directory / f"{name}.kubeconfig"
        return write_kubeconfig(path, self.api.url, self.api.ca, user, credentials)

    def start(self) -> None:
        """Start all of it, and wait until pods could be created."""
        self.api.start()
        self.scheduler.start()
        # A pod cannot be created before its namespace has this account.
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self.controllers.start(lambda: self.api.client.answers(account))

    def stop(self) -> None:
        """End all of it."""
        for daemon in (self.scheduler, self.controllers):
            daemon.stop()
        self.api.stop()
