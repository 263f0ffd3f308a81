"""What a NetworkPolicy means: one fact a case. By topic; see the package for the notation."""

from typing import Final

from tests.policy_cases import Case, make_case, np

APP_A: Final = "podSelector: {matchLabels: {app: a}}"
TO_A: Final = f"{APP_A}\ningress:\n"
FROM_A: Final = f"{APP_A}\npolicyTypes: [Egress]\negress:\n"
CLOSED: Final = np("podSelector: {}\npolicyTypes: [Ingress, Egress]", name="closed")


def from_peers(*peers: str, ports: str = "") -> str:
    """Write a policy that lets these peers reach a; `ports` is YAML."""
    return np(TO_A + _rule("from", peers, ports))


def to_peers(*peers: str, ports: str = "") -> str:
    """Write a policy that lets a reach these peers, and nobody else."""
    return np(FROM_A + _rule("to", peers, ports))


def on_ports(ports: str, *, selector: str = "{matchLabels: {app: a}}") -> str:
    """Write a policy that lets everybody reach these ports."""
    return np(f"podSelector: {selector}\ningress: [{{ports: {ports}}}]")


def _rule(key: str, peers: tuple[str, ...], ports: str) -> str:
    lines = [f"- {key}: [{', '.join(peers)}]"]
    if ports:
        lines.append(f"  ports: {ports}")
    return "\n".join(lines)


SUBJECTS: Final[list[Case]] = [
    make_case(
        "without a policy everything is allowed",
        yes="b>a:80/tcp red/a>a:53/udp client>a:80/tcp host>a:80/tcp a>server:443/tcp b>a:ping a>host:22/tcp",
    ),
    make_case(
        "a policy without rules closes ingress for everybody",
        np(APP_A),
        yes="c>b:80/tcp",
        no="b>a:80/tcp b>a:53/udp red/a>a:80/tcp default/b>a:80/tcp client>a:80/tcp b>a:ping",
    ),
    make_case(
        "a policy without policyTypes and egress leaves egress open",
        np(APP_A),
        yes="a>b:80/tcp a>server:443/tcp a>red/b:53/udp a>server:ping",
    ),
    make_case(
        "an empty podSelector selects every pod of the namespace",
        np("podSelector: {}"),
        no="b>a:80/tcp a>b:80/tcp a>c:80/tcp",
    ),
    make_case(
        "an empty podSelector selects no pod of another namespace",
        np("podSelector: {}"),
        yes="a>red/a:80/tcp a>default/a:80/tcp red/b>red/c:80/tcp",
        no="red/a>a:80/tcp",
    ),
    make_case(
        "a missing podSelector is an empty one",
        np("policyTypes: [Ingress]"),
        yes="a>red/b:80/tcp",
        no="a>b:80/tcp b>c:80/tcp",
    ),
    make_case(
        "a podSelector that is null is an empty one",
        np("podSelector:\npolicyTypes: [Ingress]"),
        no="a>b:80/tcp b>c:80/tcp",
    ),
    make_case(
        "a policy of another namespace selects nobody here",
        np(APP_A, namespace="red"),
        yes="b>a:80/tcp",
        no="a>red/a:80/tcp red/b>red/a:80/tcp",
    ),
    make_case(
        "a policy that names no namespace is of the namespace default",
        np(APP_A, namespace=""),
        yes="b>a:80/tcp",
        no="b>default/a:80/tcp",
    ),
    make_case(
        "policies of one name in two namespaces are two policies",
        np(APP_A, namespace="red"),
        np("podSelector: {matchLabels: {app: b}}"),
        yes="c>a:80/tcp c>red/b:80/tcp",
        no="c>b:80/tcp c>red/a:80/tcp",
    ),
    make_case(
        "a subject is selected by In",
        np("podSelector: {matchExpressions: [{key: app, operator: In, values: [b]}]}"),
        yes="b>a:80/tcp a>c:80/tcp",
        no="a>b:80/tcp",
    ),
    make_case(
        "In with two values selects both",
        np("podSelector: {matchExpressions: [{key: app, operator: In, values: [a, b]}]}"),
        yes="a>c:80/tcp",
        no="c>a:80/tcp c>b:80/tcp",
    ),
    make_case(
        "NotIn selects pods without the label too",
        np("podSelector: {matchExpressions: [{key: tier, operator: NotIn, values: [front]}]}"),
        yes="c>a:80/tcp",
        no="a>b:80/tcp a>c:80/tcp",
    ),
    make_case(
        "Exists selects pods that have the label with any value",
        np("podSelector: {matchExpressions: [{key: tier, operator: Exists}]}"),
        yes="a>c:80/tcp",
        no="c>a:80/tcp c>b:80/tcp",
    ),
    make_case(
        "Exists is met by a label with an empty value",
        np("podSelector: {matchExpressions: [{key: canary, operator: Exists}]}"),
        yes="c>a:80/tcp",
        no="a>c:80/tcp",
    ),
    make_case(
        "DoesNotExist selects pods that lack the label",
        np("podSelector: {matchExpressions: [{key: tier, operator: DoesNotExist}]}"),
        yes="c>a:80/tcp c>b:80/tcp",
        no="a>c:80/tcp",
    ),
    make_case(
        "matchLabels and matchExpressions must both hold",
        np(
            "podSelector: {matchLabels: {app: b},"
            " matchExpressions: [{key: tier, operator: In, values: [front, back]}]}"
        ),
        yes="c>a:80/tcp",
        no="c>b:80/tcp",
    ),
    make_case(
        "a podSelector whose parts contradict each other selects nobody",
        np(
            "podSelector: {matchLabels: {app: a},"
            " matchExpressions: [{key: app, operator: NotIn, values: [a]}]}"
        ),
        yes="b>a:80/tcp a>b:80/tcp",
    ),
    make_case(
        "two matchLabels must both hold",
        np("podSelector: {matchLabels: {app: a, tier: back}}"),
        yes="c>a:80/tcp c>b:80/tcp",
    ),
    make_case(
        "matchLabels with an empty value wants the empty value",
        np('podSelector: {matchLabels: {canary: ""}}'),
        yes="c>a:80/tcp",
        no="a>c:80/tcp",
    ),
    make_case(
        "a key with a prefix is one key",
        np("podSelector: {matchLabels: {example.com/role: db}}"),
        yes="c>b:80/tcp",
        no="b>c:80/tcp",
    ),
    make_case(
        "a key without its prefix is another key",
        np("podSelector: {matchLabels: {role: db}}"),
        yes="b>c:80/tcp",
    ),
    make_case(
        "values are compared with their case",
        np("podSelector: {matchLabels: {app: A}}"),
        yes="b>a:80/tcp",
    ),
    make_case(
        "keys are compared with their case",
        np("podSelector: {matchLabels: {App: a}}"),
        yes="b>a:80/tcp",
    ),
    make_case(
        "a namespace's labels are not its pods' labels",
        np("podSelector: {matchLabels: {team: blue}}"),
        yes="b>a:80/tcp",
    ),
    make_case(
        "a policy that selects nobody changes nothing",
        np("podSelector: {matchLabels: {app: gone}}\npolicyTypes: [Ingress, Egress]"),
        yes="b>a:80/tcp a>b:80/tcp a>server:80/tcp",
    ),
    make_case(
        "labels of kubernetes match as those of containers do",
        np(APP_A),
        yes="a>b:80/tcp",
        no="b>a:80/tcp",
        source="k8s",
    ),
]

TYPES: Final[list[Case]] = [
    make_case(
        "without policyTypes egress rules close ingress as well",
        np(f"{APP_A}\negress: [{{to: [{{podSelector: {{}}}}]}}]"),
        yes="a>b:80/tcp",
        no="b>a:80/tcp a>server:80/tcp",
    ),
    make_case(
        "without policyTypes an empty egress list leaves egress open",
        np(f"{APP_A}\negress: []"),
        yes="a>b:80/tcp a>server:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "an empty policyTypes list is as if it were missing",
        np(f"{APP_A}\npolicyTypes: []"),
        yes="a>b:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "policyTypes Egress without rules closes egress only",
        np(f"{APP_A}\npolicyTypes: [Egress]"),
        yes="b>a:80/tcp client>a:80/tcp",
        no="a>b:80/tcp a>server:443/tcp a>red/a:53/udp a>b:ping",
    ),
    make_case(
        "ingress rules without Ingress in policyTypes close nothing",
        np(f"{APP_A}\npolicyTypes: [Egress]\ningress: [{{ports: [{{port: 80}}]}}]"),
        yes="b>a:81/tcp client>a:53/udp",
        no="a>b:80/tcp",
    ),
    make_case(
        "ingress rules without Ingress in policyTypes open nothing either",
        np(f"{APP_A}\npolicyTypes: [Egress]\ningress: [{{}}]"),
        np(f"{APP_A}\npolicyTypes: [Ingress]", name="closed"),
        no="b>a:80/tcp",
    ),
    make_case(
        "egress rules without Egress in policyTypes close nothing",
        np(f"{APP_A}\npolicyTypes: [Ingress]\negress: [{{ports: [{{port: 80}}]}}]"),
        yes="a>b:81/tcp a>server:53/udp",
        no="b>a:80/tcp",
    ),
    make_case(
        "egress rules without Egress in policyTypes open nothing either",
        np(f"{APP_A}\npolicyTypes: [Ingress]\ningress: [{{}}]\negress: [{{}}]"),
        np(f"{APP_A}\npolicyTypes: [Egress]", name="closed"),
        yes="b>a:80/tcp",
        no="a>b:80/tcp",
    ),
    make_case(
        "both policyTypes without rules isolate a pod",
        np(f"{APP_A}\npolicyTypes: [Ingress, Egress]"),
        yes="b>c:80/tcp",
        no="a>b:80/tcp b>a:80/tcp a>server:80/tcp client>a:80/tcp",
    ),
    make_case(
        "the same policyType twice is no more than once",
        np(f"{APP_A}\npolicyTypes: [Ingress, Ingress]"),
        yes="a>b:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "an empty ingress list allows nobody",
        np(f"{APP_A}\ningress: []"),
        no="b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "an ingress list that is null allows nobody",
        np(f"{APP_A}\ningress:"),
        no="b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "an empty ingress rule allows everybody everything",
        np(f"{APP_A}\ningress: [{{}}]"),
        yes="b>a:80/tcp red/c>a:53/udp client>a:65535/tcp client>a:ping b>a:5000/sctp remote>a:80/tcp",
    ),
    make_case(
        "an empty egress rule allows everything to everybody",
        np(f"{APP_A}\npolicyTypes: [Egress]\negress: [{{}}]"),
        yes="a>b:80/tcp a>red/c:53/udp a>server:443/tcp a>server:ping a>host:22/tcp",
    ),
    make_case(
        "an empty egress rule says nothing about ingress",
        np(f"{APP_A}\negress: [{{}}]"),
        yes="a>server:443/tcp",
        no="b>a:80/tcp",
    ),
]

PEERS: Final[list[Case]] = [
    make_case(
        "a rule without from lets everybody in",
        np(TO_A + "- ports: [{port: 80}]"),
        yes="b>a:80/tcp red/b>a:80/tcp client>a:80/tcp remote>a:80/tcp unmanaged>a:80/tcp",
        no="b>a:81/tcp",
    ),
    make_case(
        "an empty from lets everybody in",
        np(TO_A + "- from: []\n  ports: [{port: 80}]"),
        yes="b>a:80/tcp red/b>a:80/tcp client>a:80/tcp",
        no="client>a:81/tcp",
    ),
    make_case(
        "a from that is null lets everybody in",
        np(TO_A + "- from:\n  ports: [{port: 80}]"),
        yes="client>a:80/tcp",
        no="client>a:81/tcp",
    ),
    make_case(
        "a podSelector alone means pods of the policy's namespace",
        from_peers("{podSelector: {matchLabels: {app: b}}}"),
        yes="b>a:80/tcp b>a:53/udp b>a:ping",
        no="c>a:80/tcp red/b>a:80/tcp default/b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "an empty podSelector means all pods of the policy's namespace",
        from_peers("{podSelector: {}}"),
        yes="b>a:80/tcp c>a:80/tcp",
        no="red/c>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "an empty podSelector means neither nodes nor unknown addresses",
        from_peers("{podSelector: {}}"),
        no="remote>a:80/tcp unmanaged>a:80/tcp",
    ),
    make_case(
        "an empty namespaceSelector means all pods of all namespaces",
        from_peers("{namespaceSelector: {}}"),
        yes="b>a:80/tcp red/b>a:80/tcp default/c>a:80/tcp",
    ),
    make_case(
        "an empty namespaceSelector does not mean the world",
        from_peers("{namespaceSelector: {}}"),
        no="client>a:80/tcp server>a:80/tcp",
    ),
    make_case(
        "an empty namespaceSelector means neither nodes nor unknown addresses",
        from_peers("{namespaceSelector: {}}"),
        no="remote>a:80/tcp unmanaged>a:80/tcp",
    ),
    make_case(
        "a namespaceSelector means all pods of the namespaces it selects",
        from_peers("{namespaceSelector: {matchLabels: {team: red}}}"),
        yes="red/a>a:80/tcp red/b>a:80/tcp red/c>a:80/tcp",
        no="default/a>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "the own namespace is not meant when the namespaceSelector does not select it",
        from_peers("{namespaceSelector: {matchLabels: {team: red}}}"),
        no="b>a:80/tcp",
    ),
    make_case(
        "a namespaceSelector may select the own namespace by its label",
        from_peers("{namespaceSelector: {matchLabels: {team: blue}}}"),
        yes="b>a:80/tcp",
        no="red/b>a:80/tcp",
    ),
    make_case(
        "every namespace can be selected by its name",
        from_peers("{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: default}}}"),
        yes="default/b>a:80/tcp",
        no="b>a:80/tcp red/b>a:80/tcp",
    ),
    make_case(
        "a namespaceSelector with In selects several namespaces",
        from_peers(
            "{namespaceSelector: {matchExpressions: [{key: team, operator: In, values: [red, blue]}]}}"
        ),
        yes="red/b>a:80/tcp b>a:80/tcp",
        no="default/b>a:80/tcp",
    ),
    make_case(
        "a namespaceSelector with NotIn selects namespaces without the label",
        from_peers(
            "{namespaceSelector: {matchExpressions: [{key: team, operator: NotIn, values: [red]}]}}"
        ),
        yes="default/b>a:80/tcp b>a:80/tcp",
        no="red/b>a:80/tcp",
    ),
    make_case(
        "a namespaceSelector with NotIn does not mean the world",
        from_peers(
            "{namespaceSelector: {matchExpressions: [{key: team, operator: NotIn, values: [red]}]}}"
        ),
        no="client>a:80/tcp remote>a:80/tcp unmanaged>a:80/tcp",
    ),
    make_case(
        "a namespaceSelector with Exists selects namespaces that have the label",
        from_peers("{namespaceSelector: {matchExpressions: [{key: team, operator: Exists}]}}"),
        yes="red/b>a:80/tcp b>a:80/tcp",
        no="default/b>a:80/tcp",
    ),
    make_case(
        "a namespaceSelector with DoesNotExist selects namespaces that lack the label and not the world",
        from_peers(
            "{namespaceSelector: {matchExpressions: [{key: team, operator: DoesNotExist}]}}"
        ),
        yes="default/b>a:80/tcp",
        no="b>a:80/tcp red/b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "matchLabels and matchExpressions of a namespaceSelector must both hold",
        from_peers(
            "{namespaceSelector: {matchLabels: {env: dev},"
            " matchExpressions: [{key: team, operator: In, values: [red, blue]}]}}"
        ),
        yes="red/b>a:80/tcp",
        no="b>a:80/tcp default/b>a:80/tcp",
    ),
    make_case(
        "a pod's labels are not its namespace's labels",
        from_peers("{namespaceSelector: {matchLabels: {app: b}}}"),
        no="b>a:80/tcp red/b>a:80/tcp",
    ),
    make_case(
        "namespaceSelector and podSelector in one entry must both hold",
        from_peers(
            "{namespaceSelector: {matchLabels: {team: red}}, podSelector: {matchLabels: {app: b}}}"
        ),
        yes="red/b>a:80/tcp",
        no="red/c>a:80/tcp b>a:80/tcp default/b>a:80/tcp",
    ),
    make_case(
        "namespaceSelector and podSelector in two entries are alternatives",
        from_peers(
            "{namespaceSelector: {matchLabels: {team: red}}}",
            "{podSelector: {matchLabels: {app: b}}}",
        ),
        yes="red/b>a:80/tcp red/c>a:80/tcp b>a:80/tcp",
        no="c>a:80/tcp default/b>a:80/tcp",
    ),
    make_case(
        "an empty namespaceSelector with a podSelector means such pods everywhere",
        from_peers("{namespaceSelector: {}, podSelector: {matchLabels: {app: b}}}"),
        yes="b>a:80/tcp red/b>a:80/tcp default/b>a:80/tcp",
        no="c>a:80/tcp red/c>a:80/tcp",
    ),
    make_case(
        "an empty podSelector beside a namespaceSelector means all its pods",
        from_peers("{namespaceSelector: {matchLabels: {team: red}}, podSelector: {}}"),
        yes="red/a>a:80/tcp red/c>a:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "a podSelector with NotIn stays within the own namespace",
        from_peers("{podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [b]}]}}"),
        yes="c>a:80/tcp",
        no="b>a:80/tcp red/c>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "a podSelector with DoesNotExist does not mean the world",
        from_peers("{podSelector: {matchExpressions: [{key: tier, operator: DoesNotExist}]}}"),
        yes="c>a:80/tcp",
        no="b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "negative selectors of both kinds do not mean the world",
        from_peers(
            "{namespaceSelector: {matchExpressions: [{key: team, operator: NotIn, values: [red]}]},"
            " podSelector: {matchExpressions: [{key: app, operator: NotIn, values: [b]}]}}"
        ),
        yes="c>a:80/tcp default/a>a:80/tcp",
        no="b>a:80/tcp red/c>a:80/tcp client>a:80/tcp remote>a:80/tcp",
    ),
    make_case(
        "a namespaceSelector that is null is as if it were missing",
        from_peers("{podSelector: {matchLabels: {app: b}}, namespaceSelector: null}"),
        yes="b>a:80/tcp",
        no="red/b>a:80/tcp",
    ),
    make_case(
        "a podSelector that is null beside a namespaceSelector means all its pods",
        from_peers("{namespaceSelector: {matchLabels: {team: red}}, podSelector: null}"),
        yes="red/c>a:80/tcp",
        no="c>a:80/tcp",
    ),
    make_case(
        "a peer that matches nobody lets nobody in",
        from_peers("{podSelector: {matchLabels: {app: gone}}}"),
        no="b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "several peers are alternatives",
        from_peers(
            "{podSelector: {matchLabels: {app: b}}}", "{podSelector: {matchLabels: {app: c}}}"
        ),
        yes="b>a:80/tcp c>a:80/tcp",
        no="red/b>a:80/tcp",
    ),
    make_case(
        "a pod reaches itself whatever its policy says",
        np(f"{APP_A}\npolicyTypes: [Ingress, Egress]"),
        yes="a>a:80/tcp a>a:53/udp a>a:ping",
        no="b>a:80/tcp",
    ),
    make_case(
        "another pod with the same labels is not the pod itself",
        np("podSelector: {}", namespace="red"),
        np("podSelector: {}"),
        yes="a>a:80/tcp",
        no="a>red/a:80/tcp red/a>a:80/tcp",
    ),
    make_case(
        "a process of the node reaches its pods whatever the policy says",
        np(APP_A),
        yes="host>a:80/tcp host>a:53/udp host>a:ping",
        no="b>a:80/tcp",
    ),
    make_case(
        "another node is not the pod's own",
        np(APP_A),
        yes="host>a:80/tcp",
        no="remote>a:80/tcp",
    ),
]

PORTS: Final[list[Case]] = [
    make_case(
        "a port means that port of that protocol",
        on_ports("[{protocol: TCP, port: 80}]"),
        yes="b>a:80/tcp client>a:80/tcp",
        no="b>a:81/tcp b>a:79/tcp b>a:80/udp b>a:80/sctp",
    ),
    make_case(
        "a port without a protocol is of TCP",
        on_ports("[{port: 80}]"),
        yes="b>a:80/tcp",
        no="b>a:80/udp",
    ),
    make_case(
        "a protocol that is null is TCP",
        on_ports("[{port: 80, protocol: null}]"),
        yes="b>a:80/tcp",
        no="b>a:80/udp b>a:80/sctp",
    ),
    make_case(
        "a port of UDP is no port of TCP",
        on_ports("[{protocol: UDP, port: 53}]"),
        yes="b>a:53/udp",
        no="b>a:53/tcp b>a:54/udp",
    ),
    make_case(
        "a port of SCTP is neither of TCP nor of UDP",
        on_ports("[{protocol: SCTP, port: 5000}]"),
        yes="b>a:5000/sctp",
        no="b>a:5000/tcp b>a:5000/udp b>a:5001/sctp",
    ),
    make_case(
        "an empty ports list means everything",
        np(TO_A + "- from: [{podSelector: {matchLabels: {app: b}}}]\n  ports: []"),
        yes="b>a:80/tcp b>a:53/udp b>a:5000/sctp b>a:ping",
        no="c>a:80/tcp",
    ),
    make_case(
        "ports that are null mean everything",
        np(TO_A + "- from: [{podSelector: {matchLabels: {app: b}}}]\n  ports:"),
        yes="b>a:80/tcp b>a:53/udp b>a:ping",
        no="c>a:ping",
    ),
    make_case(
        "an empty port entry means every port of TCP",
        on_ports("[{}]"),
        yes="b>a:1/tcp b>a:65535/tcp",
        no="b>a:53/udp b>a:5000/sctp b>a:ping",
    ),
    make_case(
        "a protocol without a port means all its ports",
        on_ports("[{protocol: UDP}]"),
        yes="b>a:1/udp b>a:53/udp b>a:65535/udp",
        no="b>a:53/tcp b>a:ping",
    ),
    make_case(
        "every port of SCTP can be allowed at once",
        on_ports("[{protocol: SCTP}]"),
        yes="b>a:1/sctp b>a:65535/sctp",
        no="b>a:80/tcp b>a:80/udp",
    ),
    make_case(
        "a rule that names ports does not let a ping in",
        on_ports("[{protocol: TCP}, {protocol: UDP}, {protocol: SCTP}]"),
        yes="b>a:80/tcp b>a:53/udp b>a:5000/sctp",
        no="b>a:ping client>a:ping",
    ),
    make_case(
        "several ports are alternatives",
        on_ports("[{port: 80}, {port: 443}, {protocol: UDP, port: 53}]"),
        yes="b>a:80/tcp b>a:443/tcp b>a:53/udp",
        no="b>a:53/tcp b>a:80/udp b>a:81/tcp",
    ),
    make_case(
        "one number may be open for two protocols",
        on_ports("[{protocol: TCP, port: 53}, {protocol: UDP, port: 53}]"),
        yes="b>a:53/tcp b>a:53/udp",
        no="b>a:53/sctp",
    ),
    make_case(
        "the first and the last port exist",
        on_ports("[{port: 1}, {port: 65535}]"),
        yes="b>a:1/tcp b>a:65535/tcp",
        no="b>a:2/tcp b>a:65534/tcp",
    ),
    make_case(
        "a range includes both ends",
        on_ports("[{port: 8000, endPort: 8010}]"),
        yes="b>a:8000/tcp b>a:8005/tcp b>a:8010/tcp",
        no="b>a:7999/tcp b>a:8011/tcp",
    ),
    make_case(
        "a range of one port is that port",
        on_ports("[{port: 8000, endPort: 8000}]"),
        yes="b>a:8000/tcp",
        no="b>a:7999/tcp b>a:8001/tcp",
    ),
    make_case(
        "an endPort that is null is no range",
        on_ports("[{port: 8000, endPort: null}]"),
        yes="b>a:8000/tcp",
        no="b>a:8001/tcp",
    ),
    make_case(
        "a range may reach the last port",
        on_ports("[{port: 65000, endPort: 65535}]"),
        yes="b>a:65000/tcp b>a:65535/tcp",
        no="b>a:64999/tcp",
    ),
    make_case(
        "a range may begin with the first port",
        on_ports("[{port: 1, endPort: 1023}]"),
        yes="b>a:1/tcp b>a:1023/tcp",
        no="b>a:1024/tcp",
    ),
    make_case(
        "a range across a power of two has no hole there",
        on_ports("[{port: 1023, endPort: 1025}]"),
        yes="b>a:1023/tcp b>a:1024/tcp b>a:1025/tcp",
        no="b>a:1022/tcp b>a:1026/tcp",
    ),
    make_case(
        "the widest range is every port but zero",
        on_ports("[{port: 1, endPort: 65535}]"),
        yes="b>a:1/tcp b>a:32768/tcp b>a:65535/tcp",
        no="b>a:80/udp b>a:ping",
    ),
    make_case(
        "a range of UDP is none of TCP",
        on_ports("[{protocol: UDP, port: 5000, endPort: 5999}]"),
        yes="b>a:5000/udp b>a:5999/udp",
        no="b>a:5500/tcp b>a:6000/udp",
    ),
    make_case(
        "a range of SCTP is none of UDP",
        on_ports("[{protocol: SCTP, port: 5000, endPort: 5003}]"),
        yes="b>a:5003/sctp",
        no="b>a:5003/udp b>a:5004/sctp",
    ),
    make_case(
        "between two ranges nothing is open",
        on_ports("[{port: 10, endPort: 20}, {port: 30, endPort: 40}]"),
        yes="b>a:20/tcp b>a:30/tcp",
        no="b>a:21/tcp b>a:25/tcp b>a:29/tcp",
    ),
    make_case(
        "ranges may overlap",
        on_ports("[{port: 10, endPort: 30}, {port: 20, endPort: 40}]"),
        yes="b>a:10/tcp b>a:25/tcp b>a:40/tcp",
        no="b>a:9/tcp b>a:41/tcp",
    ),
    make_case(
        "a port inside an open range stays open",
        on_ports("[{port: 8000, endPort: 8100}, {port: 8050}]"),
        yes="b>a:8049/tcp b>a:8050/tcp b>a:8051/tcp",
    ),
    make_case(
        "a named port of an ingress rule is the subject's own",
        on_ports("[{port: http}]"),
        yes="b>a:8080/tcp client>a:8080/tcp",
        no="b>a:8081/tcp b>a:80/tcp",
    ),
    make_case(
        "one name is another number on each pod that is selected",
        on_ports("[{port: http}]", selector="{}"),
        yes="c>a:8080/tcp c>b:8081/tcp",
        no="c>a:8081/tcp c>b:8080/tcp",
    ),
    make_case(
        "a pod without the named port stays closed",
        on_ports("[{port: http}]", selector="{}"),
        no="a>c:8080/tcp a>c:8081/tcp a>c:80/tcp",
    ),
    make_case(
        "a named port that nobody has opens nothing",
        on_ports("[{port: gone}]"),
        no="b>a:80/tcp b>a:8080/tcp",
    ),
    make_case(
        "a named port is of its own protocol",
        on_ports("[{protocol: UDP, port: dns}]"),
        yes="b>a:5353/udp",
        no="b>a:5353/tcp",
    ),
    make_case(
        "a name with another protocol than the pod's opens nothing",
        on_ports("[{protocol: TCP, port: dns}]"),
        no="b>a:5353/tcp b>a:5353/udp",
    ),
    make_case(
        "a named port without a protocol is of TCP",
        on_ports("[{port: dns}]"),
        no="b>a:5353/udp b>a:5353/tcp",
    ),
    make_case(
        "names and numbers stand side by side",
        on_ports("[{port: http}, {port: 80}]"),
        yes="b>a:8080/tcp b>a:80/tcp",
        no="b>a:8081/tcp",
    ),
    make_case(
        "a named port does not open its number on another pod",
        on_ports("[{port: metrics}]", selector="{}"),
        yes="a>b:9090/tcp",
        no="b>a:9090/tcp b>c:9090/tcp",
    ),
    make_case(
        "peers and ports of one rule must both match",
        from_peers("{podSelector: {matchLabels: {app: b}}}", ports="[{port: 80}]"),
        yes="b>a:80/tcp",
        no="b>a:81/tcp c>a:80/tcp",
    ),
    make_case(
        "peers of one rule do not get the ports of another",
        np(
            TO_A
            + """\
- from: [{podSelector: {matchLabels: {app: b}}}]
  ports: [{port: 80}]
- from: [{podSelector: {matchLabels: {app: c}}}]
  ports: [{port: 443}]
"""
        ),
        yes="b>a:80/tcp c>a:443/tcp",
        no="b>a:443/tcp c>a:80/tcp",
    ),
    make_case(
        "a named port with a peer opens it to that peer only",
        from_peers("{podSelector: {matchLabels: {app: b}}}", ports="[{port: http}]"),
        yes="b>a:8080/tcp",
        no="c>a:8080/tcp b>a:80/tcp",
    ),
    make_case(
        "every peer of a rule gets every port of it",
        from_peers(
            "{podSelector: {matchLabels: {app: b}}}",
            "{podSelector: {matchLabels: {app: c}}}",
            ports="[{port: 80}, {port: 443}]",
        ),
        yes="b>a:80/tcp b>a:443/tcp c>a:80/tcp c>a:443/tcp",
        no="red/b>a:80/tcp b>a:81/tcp",
    ),
]

EGRESS: Final[list[Case]] = [
    make_case(
        "closed egress reaches neither pods nor world nor the own node",
        np(f"{APP_A}\npolicyTypes: [Egress]\negress: []"),
        no="a>b:80/tcp a>server:443/tcp a>host:22/tcp a>server:53/udp a>b:ping",
    ),
    make_case(
        "closed egress does not stop answers",
        np(f"{APP_A}\npolicyTypes: [Egress]"),
        yes="b>a:80/tcp client>a:53/udp b>a:ping",
        no="a>b:80/tcp",
    ),
    make_case(
        "closed ingress does not stop answers",
        np(APP_A),
        yes="a>b:80/tcp a>server:53/udp a>b:ping",
        no="b>a:80/tcp",
    ),
    make_case(
        "an egress rule without to allows everybody",
        np(FROM_A + "- ports: [{port: 443}]"),
        yes="a>b:443/tcp a>server:443/tcp a>red/c:443/tcp a>host:443/tcp",
        no="a>b:80/tcp",
    ),
    make_case(
        "an empty to allows everybody",
        np(FROM_A + "- to: []\n  ports: [{port: 443}]"),
        yes="a>b:443/tcp a>server:443/tcp",
        no="a>server:80/tcp",
    ),
    make_case(
        "a podSelector of an egress rule means the own namespace",
        to_peers("{podSelector: {matchLabels: {app: b}}}"),
        yes="a>b:80/tcp",
        no="a>c:80/tcp a>red/b:80/tcp a>server:80/tcp",
    ),
    make_case(
        "an egress rule may name all pods of the own namespace",
        to_peers("{podSelector: {}}"),
        yes="a>b:80/tcp a>c:53/udp",
        no="a>red/c:80/tcp a>server:80/tcp a>host:80/tcp",
    ),
    make_case(
        "a namespaceSelector of an egress rule means its pods",
        to_peers("{namespaceSelector: {matchLabels: {team: red}}}"),
        yes="a>red/b:80/tcp",
        no="a>b:80/tcp a>default/b:80/tcp",
    ),
    make_case(
        "an empty namespaceSelector of an egress rule means neither world nor nodes",
        to_peers("{namespaceSelector: {}}"),
        yes="a>b:80/tcp a>red/b:80/tcp a>default/c:80/tcp",
        no="a>server:443/tcp a>host:22/tcp a>remote:22/tcp",
    ),
    make_case(
        "both selectors of an egress rule must hold",
        to_peers(
            "{namespaceSelector: {matchLabels: {team: red}}, podSelector: {matchLabels: {app: b}}}"
        ),
        yes="a>red/b:80/tcp",
        no="a>red/c:80/tcp a>b:80/tcp",
    ),
    make_case(
        "names are only resolved by those who may ask the name server",
        to_peers(
            "{namespaceSelector: {matchLabels: {team: red}}, podSelector: {matchLabels: {app: c}}}",
            ports="[{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]",
        ),
        yes="a>red/c:53/udp a>red/c:53/tcp",
        no="a>red/c:80/tcp a>red/b:53/udp a>server:53/udp",
    ),
    make_case(
        "ports of an egress rule are the destination's",
        to_peers("{podSelector: {}}", ports="[{port: 80}]"),
        yes="a>b:80/tcp",
        no="a>b:443/tcp a>b:80/udp",
    ),
    make_case(
        "a range of an egress rule includes both ends",
        to_peers("{podSelector: {}}", ports="[{port: 8000, endPort: 8999}]"),
        yes="a>b:8000/tcp a>b:8999/tcp",
        no="a>b:7999/tcp a>b:9000/tcp",
    ),
    make_case(
        "a named port of an egress rule is each peer's own",
        np(
            "podSelector: {matchLabels: {app: c}}\npolicyTypes: [Egress]\negress:\n"
            "- ports: [{port: http}]"
        ),
        yes="c>a:8080/tcp c>b:8081/tcp c>red/a:8080/tcp",
        no="c>a:8081/tcp c>b:8080/tcp",
    ),
    make_case(
        "a named port of an egress rule opens nothing towards the world",
        np(FROM_A + "- ports: [{port: http}]"),
        yes="a>b:8081/tcp",
        no="a>server:8080/tcp a>server:8081/tcp a>host:8080/tcp",
    ),
    make_case(
        "a named port of an egress rule opens nothing on pods that lack it",
        np(FROM_A + "- ports: [{port: http}]"),
        no="a>c:8080/tcp a>c:8081/tcp",
    ),
    make_case(
        "a named port of an egress rule is of its own protocol",
        np(
            "podSelector: {matchLabels: {app: c}}\npolicyTypes: [Egress]\negress:\n"
            "- ports: [{protocol: UDP, port: dns}]"
        ),
        yes="c>a:5353/udp",
        no="c>a:5353/tcp c>b:5353/udp",
    ),
    make_case(
        "a named port with a peer opens it on that peer only",
        to_peers("{podSelector: {matchLabels: {app: b}}}", ports="[{port: http}]"),
        yes="a>b:8081/tcp",
        no="a>red/b:8081/tcp a>b:8080/tcp",
    ),
    make_case(
        "what the source may send the destination must also take",
        np("podSelector: {matchLabels: {app: b}}", name="closed"),
        to_peers("{podSelector: {matchLabels: {app: b}}}"),
        no="a>b:80/tcp",
    ),
    make_case(
        "what the destination takes the source must also be allowed to send",
        np(
            "podSelector: {matchLabels: {app: b}}\ningress: [{from: [{podSelector: {}}]}]",
            name="open",
        ),
        np(f"{APP_A}\npolicyTypes: [Egress]"),
        yes="c>b:80/tcp",
        no="a>b:80/tcp",
    ),
    make_case(
        "a flow passes when both ends allow it",
        CLOSED,
        to_peers("{podSelector: {matchLabels: {app: b}}}", ports="[{port: 80}]"),
        np(
            "podSelector: {matchLabels: {app: b}}\n"
            "ingress: [{from: [{podSelector: {matchLabels: {app: a}}}], ports: [{port: 80}]}]",
            name="q",
        ),
        yes="a>b:80/tcp",
        no="a>b:81/tcp b>a:80/tcp c>b:80/tcp",
    ),
    make_case(
        "both ends must allow the same port",
        to_peers("{podSelector: {}}", ports="[{port: 80, endPort: 90}]"),
        on_ports("[{port: 85, endPort: 95}]", selector="{matchLabels: {app: b}}").replace(
            "name: p", "name: q"
        ),
        yes="a>b:85/tcp a>b:90/tcp",
        no="a>b:84/tcp a>b:91/tcp",
    ),
    make_case(
        "egress of one pod says nothing about egress of another",
        np(f"{APP_A}\npolicyTypes: [Egress]"),
        yes="b>c:80/tcp b>server:443/tcp red/a>b:80/tcp",
        no="a>c:80/tcp",
    ),
]

BLOCK: Final = "198.51.100.0/24"
BLOCK6: Final = "2001:db8:51::/48"


def block(cidr: str, cidr6: str, *, without: str = "", without6: str = "") -> tuple[str, str]:
    """Write an ipBlock of each family; `without` are exceptions, separated by commas."""
    exceptions = [f", except: [{text}]" if text else "" for text in (without, without6)]
    return (
        f"{{ipBlock: {{cidr: {cidr}{exceptions[0]}}}}}",
        f'{{ipBlock: {{cidr: "{cidr6}"{exceptions[1]}}}}}',
    )


BLOCKS: Final[list[Case]] = [
    make_case(
        "an ipBlock lets its addresses in and no others",
        from_peers(*block(BLOCK, BLOCK6)),
        yes="client>a:80/tcp client>a:53/udp client>a:ping",
        no="server>a:80/tcp b>a:80/tcp",
    ),
    make_case(
        "an ipBlock may be one address",
        from_peers(*block("198.51.100.10/32", "2001:db8:51::10/128")),
        yes="client>a:80/tcp",
        no="server>a:80/tcp",
    ),
    make_case(
        "the address beside is not in the block",
        from_peers(*block("198.51.100.11/32", "2001:db8:51::11/128")),
        no="client>a:80/tcp",
    ),
    make_case(
        "half a block ends at its bit",
        from_peers(*block("198.51.100.128/25", "2001:db8:51:8000::/49")),
        no="client>a:80/tcp",
    ),
    make_case(
        "an exception is left out",
        from_peers(*block(BLOCK, BLOCK6, without="198.51.100.0/28", without6='"2001:db8:51::/64"')),
        no="client>a:80/tcp",
    ),
    make_case(
        "beside an exception the block stays open",
        from_peers(
            *block(BLOCK, BLOCK6, without="198.51.100.128/25", without6='"2001:db8:51:8000::/49"')
        ),
        yes="client>a:80/tcp",
    ),
    make_case(
        "every exception counts",
        from_peers(
            *block(
                BLOCK,
                BLOCK6,
                without="198.51.100.128/25, 198.51.100.10/32",
                without6='"2001:db8:51:8000::/49", "2001:db8:51::10/128"',
            )
        ),
        no="client>a:80/tcp",
    ),
    make_case(
        "an empty list of exceptions leaves nothing out",
        np(
            TO_A + f"- from: [{{ipBlock: {{cidr: {BLOCK}, except: []}}}},"
            f' {{ipBlock: {{cidr: "{BLOCK6}", except: []}}}}]'
        ),
        yes="client>a:80/tcp",
        no="server>a:80/tcp",
    ),
    make_case(
        "another peer may let in what an exception leaves out",
        from_peers(
            *block(BLOCK, BLOCK6, without="198.51.100.0/28", without6='"2001:db8:51::/64"'),
            *block("198.51.100.10/32", "2001:db8:51::10/128"),
        ),
        yes="client>a:80/tcp",
    ),
    make_case(
        "another policy may let in what an exception leaves out",
        from_peers(*block(BLOCK, BLOCK6, without="198.51.100.0/28", without6='"2001:db8:51::/64"')),
        np(
            TO_A + f"- from: [{', '.join(block(BLOCK, BLOCK6))}]\n  ports: [{{port: 80}}]", name="q"
        ),
        yes="client>a:80/tcp",
        no="client>a:81/tcp",
    ),
    make_case(
        "a smaller block with fewer ports does not narrow a larger one",
        from_peers(*block("198.51.100.0/25", "2001:db8:51::/64"), ports="[{port: 80}]"),
        np(
            TO_A + f"- from: [{', '.join(block(BLOCK, BLOCK6))}]\n  ports: [{{port: 443}}]",
            name="q",
        ),
        yes="client>a:80/tcp client>a:443/tcp",
        no="client>a:81/tcp",
    ),
    make_case(
        "an exception of one rule does not narrow another rule",
        np(
            TO_A
            + f"- from: [{{ipBlock: {{cidr: {BLOCK}, except: [198.51.100.10/32]}}}},"
            + f' {{ipBlock: {{cidr: "{BLOCK6}", except: ["2001:db8:51::10/128"]}}}}]\n'
            + f"- from: [{', '.join(block(BLOCK, BLOCK6))}]\n  ports: [{{port: 22}}]\n"
        ),
        yes="client>a:22/tcp",
        no="client>a:80/tcp",
    ),
    make_case(
        "the block of all addresses means pods and nodes as well as the world",
        from_peers(*block("0.0.0.0/0", "::/0")),
        yes="client>a:80/tcp b>a:80/tcp red/c>a:53/udp remote>a:80/tcp unmanaged>a:80/tcp",
    ),
    make_case(
        "the block of all IPv4 addresses means IPv4",
        from_peers("{ipBlock: {cidr: 0.0.0.0/0}}"),
        yes="client>a:80/tcp b>a:80/tcp",
        families=(4,),
    ),
    make_case(
        "the block of all IPv4 addresses does not mean IPv6",
        from_peers("{ipBlock: {cidr: 0.0.0.0/0}}"),
        no="client>a:80/tcp b>a:80/tcp",
        families=(6,),
    ),
    make_case(
        "the block of all IPv6 addresses does not mean IPv4",
        from_peers('{ipBlock: {cidr: "::/0"}}'),
        no="client>a:80/tcp b>a:80/tcp",
        families=(4,),
    ),
    make_case(
        "the block of all IPv6 addresses means IPv6",
        from_peers('{ipBlock: {cidr: "::/0"}}'),
        yes="client>a:80/tcp b>a:80/tcp",
        families=(6,),
    ),
    make_case(
        "an ipBlock of a pod's address means the pod",
        from_peers(*block("10.244.1.22/32", "fd10:244:0:1::22/128")),
        yes="b>a:80/tcp",
        no="c>a:80/tcp red/b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "an ipBlock means pods of every namespace",
        from_peers(*block("10.244.1.0/24", "fd10:244:0:1::/64")),
        yes="b>a:80/tcp red/b>a:80/tcp default/b>a:80/tcp",
        no="client>a:80/tcp",
    ),
    make_case(
        "an exception may leave a pod out",
        from_peers(
            *block(
                "10.244.1.0/24",
                "fd10:244:0:1::/64",
                without="10.244.1.22/32",
                without6='"fd10:244:0:1::22/128"',
            )
        ),
        yes="c>a:80/tcp red/b>a:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "a pod that an exception leaves out may be let in by its labels",
        from_peers(
            *block(
                "10.244.1.0/24",
                "fd10:244:0:1::/64",
                without="10.244.1.22/32",
                without6='"fd10:244:0:1::22/128"',
            ),
            "{podSelector: {matchLabels: {app: b}}}",
        ),
        yes="b>a:80/tcp c>a:80/tcp",
    ),
    make_case(
        "a very wide block with one pod left out",
        from_peers(
            *block(
                "0.0.0.0/4",
                "f000::/4",
                without="10.244.1.23/32",
                without6='"fd10:244:0:1::23/128"',
            )
        ),
        yes="b>a:80/tcp red/c>a:80/tcp",
        no="c>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "an ipBlock of a node's address means the node",
        from_peers(*block("192.0.2.0/24", "fd99::/64")),
        yes="remote>a:80/tcp",
        no="unmanaged>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "bits beyond the length of a block do not matter",
        from_peers(*block("198.51.100.77/24", "2001:db8:51:9::77/48")),
        yes="client>a:80/tcp",
        no="server>a:80/tcp",
    ),
    make_case(
        "bits beyond the length of an exception do not matter",
        from_peers(
            *block(BLOCK, BLOCK6, without="198.51.100.1/28", without6='"2001:db8:51::7/64"')
        ),
        no="client>a:80/tcp",
    ),
    make_case(
        "an IPv6 block may be written in any way",
        from_peers('{ipBlock: {cidr: "2001:0DB8:0051:0:0:0:0:0/48"}}'),
        yes="client>a:80/tcp",
        no="server>a:80/tcp",
        families=(6,),
    ),
    make_case(
        "a block written twice is one block",
        from_peers(*block(BLOCK, BLOCK6), *block(BLOCK, BLOCK6)),
        yes="client>a:80/tcp",
        no="server>a:80/tcp",
    ),
    make_case(
        "an ipBlock and ports of one rule must both match",
        from_peers(*block(BLOCK, BLOCK6), ports="[{port: 80}]"),
        yes="client>a:80/tcp",
        no="client>a:81/tcp client>a:80/udp server>a:80/tcp",
    ),
    make_case(
        "an ipBlock beside a selector is an alternative",
        from_peers(*block(BLOCK, BLOCK6), "{podSelector: {matchLabels: {app: b}}}"),
        yes="client>a:80/tcp b>a:80/tcp",
        no="server>a:80/tcp c>a:80/tcp",
    ),
    make_case(
        "an ipBlock of an egress rule means the world's addresses",
        to_peers(*block("203.0.113.0/24", "2001:db8:113::/48")),
        yes="a>server:443/tcp",
        no="a>client:443/tcp a>b:443/tcp",
    ),
    make_case(
        "an exception of an egress rule is left out",
        to_peers(
            *block("0.0.0.0/0", "::/0", without="203.0.113.0/24", without6='"2001:db8:113::/48"')
        ),
        yes="a>client:443/tcp a>b:80/tcp",
        no="a>server:443/tcp",
    ),
    make_case(
        "an egress rule to everything but the cluster leaves pods out",
        to_peers(*block("0.0.0.0/0", "::/0", without="10.244.0.0/16", without6='"fd10:244::/48"')),
        yes="a>server:443/tcp a>host:443/tcp",
        no="a>b:80/tcp a>red/a:80/tcp",
    ),
    make_case(
        "an ipBlock of an egress rule may name a pod",
        to_peers(*block("10.244.1.32/32", "fd10:244:0:1::32/128")),
        yes="a>red/b:80/tcp",
        no="a>red/c:80/tcp a>b:80/tcp",
    ),
    make_case(
        "an egress rule to the address of the own node opens it",
        to_peers(*block("192.0.2.10/32", "fd99::a/128"), ports="[{port: 6443}]"),
        yes="a>host:6443/tcp",
        no="a>host:22/tcp a>remote:6443/tcp",
    ),
    make_case(
        "a named port opens nothing towards an ipBlock, also where its pods have it",
        to_peers(*block("10.244.1.0/24", "fd10:244:0:1::/64"), ports="[{port: http}, {port: 80}]"),
        yes="a>b:80/tcp",
        no="a>b:8081/tcp a>red/a:8080/tcp a>b:8080/tcp",
    ),
    make_case(
        "a named port beside an ipBlock is that of pods that a selector names",
        to_peers(
            *block("10.244.1.0/24", "fd10:244:0:1::/64"),
            "{podSelector: {matchLabels: {app: b}}}",
            ports="[{port: http}]",
        ),
        yes="a>b:8081/tcp",
        no="a>red/b:8081/tcp a>b:8080/tcp",
    ),
    make_case(
        "a named port from an ipBlock is the subject's own",
        from_peers(*block("10.244.1.0/24", "fd10:244:0:1::/64"), ports="[{port: http}]"),
        yes="b>a:8080/tcp red/b>a:8080/tcp",
        no="b>a:8081/tcp client>a:8080/tcp",
    ),
]

TOGETHER: Final[list[Case]] = [
    make_case(
        "rules of one policy are alternatives",
        np(TO_A + "- from: [{podSelector: {matchLabels: {app: b}}}]\n- ports: [{port: 80}]"),
        yes="b>a:22/tcp c>a:80/tcp client>a:80/tcp",
        no="c>a:22/tcp",
    ),
    make_case(
        "policies are alternatives",
        from_peers("{podSelector: {matchLabels: {app: b}}}"),
        np(TO_A + "- from: [{podSelector: {matchLabels: {app: c}}}]", name="q"),
        yes="b>a:80/tcp c>a:80/tcp",
        no="red/b>a:80/tcp",
    ),
    make_case(
        "a closed namespace with one open door",
        CLOSED,
        np(
            "podSelector: {matchLabels: {app: b}}\n"
            "ingress: [{from: [{namespaceSelector: {matchLabels: {team: red}}}]}]"
        ),
        yes="red/a>b:80/tcp",
        no="red/a>a:80/tcp a>b:80/tcp client>b:80/tcp b>red/a:80/tcp",
    ),
    make_case(
        "a policy that allows everything undoes one that closes",
        np("podSelector: {}", name="closed"),
        np(f"{APP_A}\ningress: [{{}}]"),
        yes="client>a:80/tcp b>a:80/tcp",
        no="a>b:80/tcp",
    ),
    make_case(
        "one policy closes ingress and another egress",
        np(f"{APP_A}\npolicyTypes: [Ingress]"),
        np(f"{APP_A}\npolicyTypes: [Egress]", name="q"),
        yes="b>c:80/tcp",
        no="a>b:80/tcp b>a:80/tcp",
    ),
    make_case(
        "a policy for ingress does not open what another closes for egress",
        np(f"{APP_A}\ningress: [{{}}]"),
        np(f"{APP_A}\npolicyTypes: [Egress]", name="q"),
        yes="b>a:80/tcp",
        no="a>b:80/tcp",
    ),
    make_case(
        "policies that select a pod by different labels both hold",
        np("podSelector: {matchLabels: {app: b}}\ningress: [{ports: [{port: 80}]}]"),
        np("podSelector: {matchLabels: {tier: back}}\ningress: [{ports: [{port: 443}]}]", name="q"),
        yes="a>b:80/tcp a>b:443/tcp",
        no="a>b:22/tcp",
    ),
    make_case(
        "a rule of a policy for one pod opens nothing on another",
        np("podSelector: {}", name="closed"),
        from_peers("{podSelector: {matchLabels: {app: c}}}"),
        yes="c>a:80/tcp",
        no="c>b:80/tcp",
    ),
    make_case(
        "each namespace decides for its own pods",
        np("podSelector: {}"),
        np("podSelector: {}\ningress: [{}]", namespace="red"),
        yes="a>red/b:80/tcp a>default/b:80/tcp",
        no="red/b>a:80/tcp default/b>a:80/tcp",
    ),
    make_case(
        "a path through three pods opens no shortcut",
        CLOSED,
        np(
            "podSelector: {matchLabels: {app: a}}\npolicyTypes: [Egress]\n"
            "egress: [{to: [{podSelector: {matchLabels: {app: b}}}]}]",
            name="a-out",
        ),
        np(
            "podSelector: {matchLabels: {app: b}}\n"
            "ingress: [{from: [{podSelector: {matchLabels: {app: a}}}]}]\n"
            "egress: [{to: [{podSelector: {matchLabels: {app: c}}}]}]",
            name="b",
        ),
        np(
            "podSelector: {matchLabels: {app: c}}\n"
            "ingress: [{from: [{podSelector: {matchLabels: {app: b}}}]}]",
            name="c-in",
        ),
        yes="a>b:80/tcp b>c:80/tcp",
        no="a>c:80/tcp b>a:80/tcp c>b:80/tcp",
    ),
    make_case(
        "two policies that are alike are as one",
        from_peers("{podSelector: {matchLabels: {app: b}}}"),
        from_peers("{podSelector: {matchLabels: {app: b}}}").replace("name: p", "name: q"),
        yes="b>a:80/tcp",
        no="c>a:80/tcp",
    ),
    make_case(
        "ports of policies add up",
        on_ports("[{port: 80}]"),
        np(f"{APP_A}\ningress: [{{ports: [{{port: 81, endPort: 90}}]}}]", name="q"),
        yes="b>a:80/tcp b>a:81/tcp b>a:90/tcp",
        no="b>a:79/tcp b>a:91/tcp",
    ),
    make_case(
        "all ports for one peer and one port for all",
        from_peers("{podSelector: {matchLabels: {app: b}}}"),
        np(f"{APP_A}\ningress: [{{ports: [{{port: 443}}]}}]", name="q"),
        yes="b>a:22/tcp c>a:443/tcp client>a:443/tcp",
        no="c>a:22/tcp",
    ),
    make_case(
        "a pod under two namespaces' worth of peers",
        np(
            TO_A
            + "- from: [{namespaceSelector: {matchLabels: {team: red}}, podSelector: {matchLabels: {app: a}}}]\n"
            + "  ports: [{port: 80}]\n"
            + "- from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: default}}}]\n"
            + "  ports: [{port: 443}]\n"
        ),
        yes="red/a>a:80/tcp default/c>a:443/tcp",
        no="red/a>a:443/tcp default/c>a:80/tcp red/b>a:80/tcp b>a:443/tcp",
    ),
    make_case(
        "pods of one kind may talk to each other across namespaces only where both sides say so",
        np(
            f"{APP_A}\ningress: [{{from: [{{namespaceSelector: {{}},"
            " podSelector: {matchLabels: {app: a}}}]}]"
        ),
        np(f"{APP_A}", namespace="red"),
        yes="red/a>a:80/tcp default/a>a:80/tcp a>default/a:80/tcp",
        no="a>red/a:80/tcp red/b>a:80/tcp",
    ),
]

CASES: Final = [*SUBJECTS, *TYPES, *PEERS, *PORTS, *EGRESS, *BLOCKS, *TOGETHER]
