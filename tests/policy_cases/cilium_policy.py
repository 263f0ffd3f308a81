"""What a CiliumNetworkPolicy means, layers 3 and 4: one fact a case. By topic; see the package for the notation."""

from typing import Final

from tests.policy_cases import Case, ccnp, cidr_group, cnp, make_case, np

APP_A: Final = "endpointSelector: {matchLabels: {app: a}}"
EVERYBODY: Final = "endpointSelector: {}"
OPEN: Final = "{fromEntities: [all]}"


def ingress(*rules: str, deny: str = "", extra: str = "") -> str:
    """Write a policy for a: `rules` and `deny` are YAML of rules."""
    return cnp(_spec(APP_A, "ingress", rules, deny, extra))


def egress(*rules: str, deny: str = "", extra: str = "") -> str:
    """Write a policy for what a sends."""
    return cnp(_spec(APP_A, "egress", rules, deny, extra))


def _spec(subject: str, section: str, rules: tuple[str, ...], deny: str, extra: str) -> str:
    lines = [subject, f"{section}: [{', '.join(rules)}]"]
    if deny:
        lines.append(f"{section}Deny: [{deny}]")
    return "\n".join([*lines, extra])


def on_ports(ports: str) -> str:
    """Write a policy that lets everybody reach these ports of a."""
    return ingress(f"{{toPorts: [{{ports: {ports}}}]}}")


SUBJECTS: Final[list[Case]] = [
    make_case(
        "an empty ingress rule closes ingress",
        ingress("{}"),
        yes="a>b:80/tcp",
        no="b>a:80/tcp client>a:80/tcp b>a:ping",
    ),
    make_case(
        "an empty egress rule closes egress",
        egress("{}"),
        yes="b>a:80/tcp",
        no="a>b:80/tcp a>server:443/tcp a>host:22/tcp",
    ),
    make_case(
        "egress rules leave ingress open",
        egress("{toEndpoints: [{matchLabels: {app: b}}]}"),
        yes="a>b:80/tcp c>a:80/tcp client>a:80/tcp",
        no="a>c:80/tcp",
    ),
    make_case(
        "an empty endpointSelector selects every pod of the namespace",
        cnp(f"{EVERYBODY}\ningress: [{{}}]"),
        yes="a>red/b:80/tcp",
        no="b>a:80/tcp a>b:80/tcp a>c:80/tcp",
    ),
    make_case(
        "an empty endpointSelector of a clusterwide policy selects every pod",
        ccnp(f"{EVERYBODY}\ningress: [{{}}]"),
        no="b>a:80/tcp a>red/b:80/tcp a>default/c:80/tcp",
    ),
    make_case(
        "a policy of another namespace selects nobody here",
        cnp(f"{APP_A}\ningress: [{{}}]", namespace="red"),
        yes="b>a:80/tcp",
        no="b>red/a:80/tcp",
    ),
    make_case(
        "a clusterwide policy selects by labels in every namespace",
        ccnp(f"{APP_A}\ningress: [{{}}]"),
        yes="a>b:80/tcp",
        no="b>a:80/tcp b>red/a:80/tcp b>default/a:80/tcp",
    ),
    make_case(
        "a clusterwide policy may select one namespace",
        ccnp(
            "endpointSelector: {matchLabels: {k8s:io.kubernetes.pod.namespace: red}}\ningress: [{}]"
        ),
        yes="red/a>a:80/tcp",
        no="a>red/a:80/tcp a>red/c:80/tcp",
    ),
    make_case(
        "a clusterwide policy may select namespaces by their labels",
        ccnp(
            "endpointSelector: {matchLabels: {io.cilium.k8s.namespace.labels.env: prod}}\n"
            "ingress: [{}]"
        ),
        yes="a>red/a:80/tcp a>default/a:80/tcp",
        no="red/a>a:80/tcp",
    ),
    make_case(
        "a clusterwide policy may leave a namespace out",
        ccnp(
            "endpointSelector: {matchExpressions: [{key: io.kubernetes.pod.namespace,"
            " operator: NotIn, values: [red]}]}\ningress: [{}]"
        ),
        yes="a>red/a:80/tcp",
        no="red/a>a:80/tcp a>default/a:80/tcp",
    ),
    make_case(
        "a subject may name its own namespace",
        cnp(
            "endpointSelector: {matchLabels: {app: a, k8s:io.kubernetes.pod.namespace: blue}}\n"
            "ingress: [{}]"
        ),
        yes="b>red/a:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "a subject is selected by expressions",
        cnp(
            "endpointSelector: {matchExpressions: [{key: app, operator: In, values: [a, b]},"
            " {key: tier, operator: NotIn, values: [back]}]}\ningress: [{}]"
        ),
        yes="c>b:80/tcp",
        no="c>a:80/tcp",
    ),
    make_case(
        "a subject is selected by the absence of a label",
        cnp(
            "endpointSelector: {matchExpressions: [{key: tier, operator: DoesNotExist}]}\n"
            "ingress: [{}]"
        ),
        yes="c>a:80/tcp",
        no="a>c:80/tcp",
    ),
    make_case(
        "a key without a source matches labels of containers",
        cnp("endpointSelector: {matchLabels: {app: a}}\ningress: [{}]"),
        no="b>a:80/tcp",
    ),
    make_case(
        "a key without a source matches labels of kubernetes",
        cnp("endpointSelector: {matchLabels: {app: a}}\ningress: [{}]"),
        no="b>a:80/tcp",
        source="k8s",
    ),
    make_case(
        "the source any is no source",
        cnp('endpointSelector: {matchLabels: {"any:app": a}}\ningress: [{}]'),
        yes="c>b:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "the source k8s matches labels of kubernetes",
        cnp('endpointSelector: {matchLabels: {"k8s:app": a}}\ningress: [{}]'),
        no="b>a:80/tcp",
        source="k8s",
    ),
    make_case(
        "the source k8s does not match labels of containers",
        cnp('endpointSelector: {matchLabels: {"k8s:app": a}}\ningress: [{}]'),
        yes="b>a:80/tcp",
    ),
    make_case(
        "the source cni matches labels of containers",
        cnp('endpointSelector: {matchLabels: {"cni:app": a}}\ningress: [{}]'),
        no="b>a:80/tcp",
    ),
    make_case(
        "the source cni does not match labels of kubernetes",
        cnp('endpointSelector: {matchLabels: {"cni:app": a}}\ningress: [{}]'),
        yes="b>a:80/tcp",
        source="k8s",
    ),
    make_case(
        "a source stands before the key of an expression too",
        cnp(
            'endpointSelector: {matchExpressions: [{key: "cni:tier", operator: Exists}]}\n'
            "ingress: [{}]"
        ),
        yes="a>c:80/tcp",
        no="c>a:80/tcp c>b:80/tcp",
    ),
    make_case(
        "a subject may leave out who is no endpoint, which changes nothing",
        ccnp(
            'endpointSelector: {matchLabels: {app: a}, matchExpressions: [{key: "reserved:host",'
            " operator: DoesNotExist}]}\ningress: [{}]"
        ),
        yes="a>b:80/tcp",
        no="b>a:80/tcp red/b>red/a:80/tcp",
    ),
    make_case(
        "several specs of one policy have each their own subject",
        (
            "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\n"
            "metadata: {name: p, namespace: blue}\n"
            "specs:\n"
            "- {endpointSelector: {matchLabels: {app: a}}, ingress: [{}]}\n"
            "- {endpointSelector: {matchLabels: {app: b}}, egress: [{}]}\n"
        ),
        yes="a>c:80/tcp a>b:80/tcp",
        no="b>a:80/tcp b>c:80/tcp",
    ),
    make_case(
        "spec and specs of one policy both hold",
        (
            "apiVersion: cilium.io/v2\nkind: CiliumNetworkPolicy\n"
            "metadata: {name: p, namespace: blue}\n"
            "spec: {endpointSelector: {matchLabels: {app: a}}, ingress: [{}]}\n"
            "specs:\n"
            "- {endpointSelector: {matchLabels: {app: b}}, ingress: [{}]}\n"
        ),
        yes="a>c:80/tcp",
        no="c>a:80/tcp c>b:80/tcp",
    ),
    make_case(
        "labels and description change nothing",
        cnp(
            f"{APP_A}\ndescription: closes a\n"
            "labels: [{key: owner, source: k8s, value: web}]\ningress: [{}]"
        ),
        no="b>a:80/tcp",
    ),
    make_case(
        "a pod reaches itself whatever the policy says",
        cnp(
            f"{APP_A}\ningressDeny: [{{fromEntities: [all]}}]\negressDeny: [{{toEntities: [all]}}]"
        ),
        yes="a>a:80/tcp a>a:ping",
        no="b>a:80/tcp a>b:80/tcp",
    ),
    make_case(
        "the node reaches its pods whatever the policy says",
        cnp(f"{APP_A}\ningressDeny: [{{fromEntities: [all]}}]"),
        yes="host>a:80/tcp",
        no="remote>a:80/tcp",
    ),
]

ENDPOINTS: Final[list[Case]] = [
    make_case(
        "fromEndpoints means pods of the policy's namespace",
        ingress("{fromEndpoints: [{matchLabels: {app: b}}]}"),
        yes="b>a:80/tcp b>a:53/udp b>a:ping",
        no="c>a:80/tcp red/b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "an empty selector of fromEndpoints means every pod of the namespace",
        ingress("{fromEndpoints: [{}]}"),
        yes="b>a:80/tcp c>a:80/tcp",
        no="red/b>a:80/tcp client>a:80/tcp remote>a:80/tcp unmanaged>a:80/tcp",
    ),
    make_case(
        "an empty list of fromEndpoints means nobody",
        ingress("{fromEndpoints: []}"),
        no="b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "an empty list of fromEndpoints with ports means nobody",
        ingress('{fromEndpoints: [], toPorts: [{ports: [{port: "80"}]}]}'),
        no="b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "fromEndpoints that is null with ports means everybody",
        ingress('{fromEndpoints: null, toPorts: [{ports: [{port: "80"}]}]}'),
        yes="b>a:80/tcp client>a:80/tcp",
        no="b>a:81/tcp",
    ),
    make_case(
        "several selectors are alternatives",
        ingress("{fromEndpoints: [{matchLabels: {app: b}}, {matchLabels: {app: c}}]}"),
        yes="b>a:80/tcp c>a:80/tcp",
        no="red/c>a:80/tcp",
    ),
    make_case(
        "labels of one selector must all hold",
        ingress("{fromEndpoints: [{matchLabels: {app: b, tier: front}}]}"),
        no="b>a:80/tcp c>a:80/tcp",
    ),
    make_case(
        "naming a namespace leaves the own one",
        ingress("{fromEndpoints: [{matchLabels: {k8s:io.kubernetes.pod.namespace: red}}]}"),
        yes="red/a>a:80/tcp red/c>a:80/tcp",
        no="b>a:80/tcp default/b>a:80/tcp",
    ),
    make_case(
        "a namespace may be named without a source",
        ingress("{fromEndpoints: [{matchLabels: {io.kubernetes.pod.namespace: red, app: b}}]}"),
        yes="red/b>a:80/tcp",
        no="red/c>a:80/tcp b>a:80/tcp",
    ),
    make_case(
        "several namespaces may be named",
        ingress(
            "{fromEndpoints: [{matchExpressions: [{key: k8s:io.kubernetes.pod.namespace,"
            " operator: In, values: [red, default]}]}]}"
        ),
        yes="red/b>a:80/tcp default/b>a:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "any namespace is asked for by Exists",
        ingress(
            "{fromEndpoints: [{matchLabels: {app: b}, matchExpressions:"
            " [{key: io.kubernetes.pod.namespace, operator: Exists}]}]}"
        ),
        yes="b>a:80/tcp red/b>a:80/tcp default/b>a:80/tcp",
        no="c>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "all namespaces but one are still pods only",
        ingress(
            "{fromEndpoints: [{matchExpressions: [{key: k8s:io.kubernetes.pod.namespace,"
            " operator: NotIn, values: [red]}]}]}"
        ),
        yes="b>a:80/tcp default/b>a:80/tcp",
        no="red/b>a:80/tcp client>a:80/tcp remote>a:80/tcp",
    ),
    make_case(
        "namespaces may be named by their labels",
        ingress("{fromEndpoints: [{matchLabels: {k8s:io.cilium.k8s.namespace.labels.team: red}}]}"),
        yes="red/a>a:80/tcp",
        no="b>a:80/tcp default/a>a:80/tcp",
    ),
    make_case(
        "a service account that no pod has names nobody",
        ingress("{fromEndpoints: [{matchLabels: {io.cilium.k8s.policy.serviceaccount: seller}}]}"),
        no="b>a:80/tcp red/a>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "namespaces may be left out by their labels, which does not mean the world",
        ingress(
            "{fromEndpoints: [{matchExpressions: [{key: io.cilium.k8s.namespace.labels.team,"
            " operator: NotIn, values: [red]}]}]}"
        ),
        yes="b>a:80/tcp default/a>a:80/tcp",
        no="red/a>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "namespaces may be named by the label that is their name",
        ingress(
            "{fromEndpoints: [{matchLabels:"
            " {io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name: default, app: c}}]}"
        ),
        yes="default/c>a:80/tcp",
        no="default/b>a:80/tcp c>a:80/tcp",
    ),
    make_case(
        "NotIn stays within the own namespace",
        ingress(
            "{fromEndpoints: [{matchExpressions: [{key: app, operator: NotIn, values: [b]}]}]}"
        ),
        yes="c>a:80/tcp",
        no="b>a:80/tcp red/c>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "an empty selector in a clusterwide policy means every pod and not the world",
        ccnp(f"{APP_A}\ningress: [{{fromEndpoints: [{{}}]}}]"),
        yes="b>a:80/tcp red/b>a:80/tcp default/c>red/a:80/tcp",
        no="client>a:80/tcp remote>a:80/tcp unmanaged>a:80/tcp",
    ),
    make_case(
        "a selector in a clusterwide policy means such pods everywhere",
        ccnp(f"{APP_A}\ningress: [{{fromEndpoints: [{{matchLabels: {{app: b}}}}]}}]"),
        yes="b>a:80/tcp red/b>a:80/tcp b>red/a:80/tcp",
        no="c>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "NotIn in a clusterwide policy does not mean the world",
        ccnp(
            f"{APP_A}\ningress: [{{fromEndpoints: [{{matchExpressions:"
            " [{key: app, operator: NotIn, values: [b]}]}]}]"
        ),
        yes="c>a:80/tcp red/c>a:80/tcp",
        no="b>a:80/tcp client>a:80/tcp remote>a:80/tcp",
    ),
    make_case(
        "a reserved label names who is no pod",
        ingress('{fromEndpoints: [{matchLabels: {"reserved:world": ""}}]}'),
        yes="client>a:80/tcp",
        no="b>a:80/tcp remote>a:80/tcp",
    ),
    make_case(
        "a reserved label can be the other nodes",
        ingress(
            '{fromEndpoints: [{matchExpressions: [{key: "reserved:remote-node", operator: Exists}]}]}'
        ),
        yes="remote>a:80/tcp",
        no="client>a:80/tcp b>a:80/tcp",
    ),
    make_case(
        "a key without a source does not match a reserved label",
        ingress("{fromEndpoints: [{matchLabels: {world: ''}}]}"),
        no="client>a:80/tcp",
    ),
    make_case(
        "toEndpoints means pods of the policy's namespace",
        egress("{toEndpoints: [{matchLabels: {app: b}}]}"),
        yes="a>b:80/tcp",
        no="a>c:80/tcp a>red/b:80/tcp a>server:80/tcp",
    ),
    make_case(
        "toEndpoints may name another namespace",
        egress("{toEndpoints: [{matchLabels: {k8s:io.kubernetes.pod.namespace: red, app: b}}]}"),
        yes="a>red/b:80/tcp",
        no="a>b:80/tcp a>red/c:80/tcp",
    ),
    make_case(
        "an empty list of toEndpoints means nobody",
        egress("{toEndpoints: []}"),
        no="a>b:80/tcp a>server:80/tcp",
    ),
    make_case(
        "an empty selector of toEndpoints means every pod of the namespace",
        egress("{toEndpoints: [{}]}"),
        yes="a>b:80/tcp a>c:ping",
        no="a>red/b:80/tcp a>server:80/tcp a>host:80/tcp",
    ),
]

ENTITIES: Final[list[Case]] = [
    make_case(
        "the entity all means everybody",
        ingress("{fromEntities: [all]}"),
        yes="b>a:80/tcp red/b>a:53/udp client>a:80/tcp remote>a:80/tcp unmanaged>a:80/tcp client>a:ping",
    ),
    make_case(
        "the entity world means who is outside the cluster",
        ingress("{fromEntities: [world]}"),
        yes="client>a:80/tcp server>a:53/udp",
        no="b>a:80/tcp red/b>a:80/tcp remote>a:80/tcp unmanaged>a:80/tcp",
    ),
    make_case(
        "the entity world-ipv4 means the world of IPv4",
        ingress("{fromEntities: [world-ipv4]}"),
        yes="client>a:80/tcp",
        no="b>a:80/tcp remote>a:80/tcp",
        families=(4,),
    ),
    make_case(
        "the entity world-ipv4 does not mean IPv6",
        ingress("{fromEntities: [world-ipv4]}"),
        no="client>a:80/tcp b>a:80/tcp",
        families=(6,),
    ),
    make_case(
        "the entity world-ipv6 means the world of IPv6",
        ingress("{fromEntities: [world-ipv6]}"),
        yes="client>a:80/tcp",
        no="b>a:80/tcp",
        families=(6,),
    ),
    make_case(
        "the entity world-ipv6 does not mean IPv4",
        ingress("{fromEntities: [world-ipv6]}"),
        no="client>a:80/tcp",
        families=(4,),
    ),
    make_case(
        "the entity cluster means pods of every namespace and nodes",
        ingress("{fromEntities: [cluster]}"),
        yes="b>a:80/tcp red/b>a:80/tcp remote>a:80/tcp unmanaged>a:80/tcp",
        no="client>a:80/tcp server>a:80/tcp",
    ),
    make_case(
        "the entity host means the own node",
        egress("{toEntities: [host]}"),
        yes="a>host:22/tcp",
        no="a>remote:22/tcp a>b:80/tcp a>server:443/tcp",
    ),
    make_case(
        "the entity remote-node means the other nodes",
        egress("{toEntities: [remote-node]}"),
        yes="a>remote:22/tcp",
        no="a>host:22/tcp a>server:443/tcp",
    ),
    make_case(
        "the entity unmanaged means addresses of the cluster that nobody has",
        egress("{toEntities: [unmanaged]}"),
        yes="a>unmanaged:80/tcp",
        no="a>b:80/tcp a>server:80/tcp",
    ),
    make_case(
        "the entity none means nobody",
        ingress("{fromEntities: [none]}"),
        no="b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "the entities health and init are nobody here",
        ingress("{fromEntities: [health, init]}"),
        no="b>a:80/tcp client>a:80/tcp remote>a:80/tcp",
    ),
    make_case(
        "several entities are alternatives",
        egress("{toEntities: [host, world]}"),
        yes="a>host:22/tcp a>server:443/tcp",
        no="a>b:80/tcp a>remote:22/tcp",
    ),
    make_case(
        "an empty list of entities means nobody",
        ingress("{fromEntities: []}"),
        no="b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "toEntities world means who is outside the cluster",
        egress("{toEntities: [world]}"),
        yes="a>server:443/tcp a>client:53/udp",
        no="a>b:80/tcp a>host:22/tcp",
    ),
    make_case(
        "toEntities cluster means everybody but the world",
        egress("{toEntities: [cluster]}"),
        yes="a>b:80/tcp a>red/c:80/tcp a>host:22/tcp a>remote:22/tcp",
        no="a>server:443/tcp",
    ),
    make_case(
        "toEntities all means everybody",
        egress("{toEntities: [all]}"),
        yes="a>b:80/tcp a>server:443/tcp a>host:22/tcp a>server:ping",
    ),
    make_case(
        "an entity and ports of one rule must both match",
        ingress('{fromEntities: [world], toPorts: [{ports: [{port: "80", protocol: TCP}]}]}'),
        yes="client>a:80/tcp",
        no="client>a:81/tcp b>a:80/tcp client>a:80/udp",
    ),
]

BLOCK: Final = "198.51.100.0/24"
BLOCK6: Final = "2001:db8:51::/48"

BLOCKS: Final[list[Case]] = [
    make_case(
        "fromCIDR lets addresses of the world in",
        ingress(f'{{fromCIDR: [{BLOCK}, "{BLOCK6}"]}}'),
        yes="client>a:80/tcp client>a:ping",
        no="server>a:80/tcp b>a:80/tcp",
    ),
    make_case(
        "fromCIDR may be an address without a length",
        ingress('{fromCIDR: [198.51.100.10, "2001:db8:51::10"]}'),
        yes="client>a:80/tcp",
        no="server>a:80/tcp",
    ),
    make_case(
        "fromCIDR of everything means the world and no pod",
        ingress('{fromCIDR: [0.0.0.0/0, "::/0"]}'),
        yes="client>a:80/tcp server>a:80/tcp",
        no="b>a:80/tcp red/b>a:80/tcp remote>a:80/tcp unmanaged>a:80/tcp",
    ),
    make_case(
        "fromCIDR of all IPv4 addresses does not mean IPv6",
        ingress("{fromCIDR: [0.0.0.0/0]}"),
        no="client>a:80/tcp",
        families=(6,),
    ),
    make_case(
        "fromCIDR of all IPv6 addresses does not mean IPv4",
        ingress('{fromCIDR: ["::/0"]}'),
        no="client>a:80/tcp",
        families=(4,),
    ),
    make_case(
        "fromCIDR of a pod's address does not mean the pod",
        ingress('{fromCIDR: [10.244.1.22/32, "fd10:244:0:1::22/128"]}'),
        no="b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "toCIDR of a node's address does not mean the node",
        egress('{toCIDR: [192.0.2.0/24, "fd99::/64"]}'),
        no="a>host:22/tcp a>remote:22/tcp",
    ),
    make_case(
        "an empty list of fromCIDR means nobody",
        ingress("{fromCIDR: []}"),
        no="client>a:80/tcp b>a:80/tcp",
    ),
    make_case(
        "bits beyond the length of a CIDR do not matter",
        ingress('{fromCIDR: [198.51.100.77/24, "2001:db8:51:7::7/48"]}'),
        yes="client>a:80/tcp",
        no="server>a:80/tcp",
    ),
    make_case(
        "several CIDRs are alternatives",
        ingress(f'{{fromCIDR: [{BLOCK}, "{BLOCK6}", 203.0.113.20/32, "2001:db8:113::20/128"]}}'),
        yes="client>a:80/tcp server>a:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "fromCIDRSet lets its addresses in",
        ingress(f'{{fromCIDRSet: [{{cidr: {BLOCK}}}, {{cidr: "{BLOCK6}"}}]}}'),
        yes="client>a:80/tcp",
        no="server>a:80/tcp b>a:80/tcp",
    ),
    make_case(
        "fromCIDRSet leaves its exceptions out",
        ingress(
            "{fromCIDRSet: [{cidr: 0.0.0.0/0, except: [198.51.100.0/24]},"
            ' {cidr: "::/0", except: ["2001:db8:51::/48"]}]}'
        ),
        yes="server>a:80/tcp",
        no="client>a:80/tcp b>a:80/tcp",
    ),
    make_case(
        "every exception of fromCIDRSet counts",
        ingress(
            "{fromCIDRSet: [{cidr: 0.0.0.0/0, except: [198.51.100.0/24, 203.0.113.0/28]},"
            ' {cidr: "::/0", except: ["2001:db8:51::/48", "2001:db8:113:1::/64"]}]}'
        ),
        yes="server>a:80/tcp",
        no="client>a:80/tcp",
    ),
    make_case(
        "an exception may be the whole block, which then means nobody",
        ingress(
            f"{{fromCIDRSet: [{{cidr: {BLOCK}, except: [{BLOCK}]}},"
            f' {{cidr: "{BLOCK6}", except: ["{BLOCK6}"]}}]}}'
        ),
        no="client>a:80/tcp server>a:80/tcp",
    ),
    make_case(
        "another entry may let in what an exception leaves out",
        ingress(
            "{fromCIDRSet: [{cidr: 0.0.0.0/0, except: [198.51.100.0/24]},"
            ' {cidr: "::/0", except: ["2001:db8:51::/48"]},'
            ' {cidr: 198.51.100.10/32}, {cidr: "2001:db8:51::10/128"}]}'
        ),
        yes="client>a:80/tcp server>a:80/tcp",
    ),
    make_case(
        "an exception of one rule does not narrow another",
        ingress(
            "{fromCIDRSet: [{cidr: 0.0.0.0/0, except: [198.51.100.0/24]},"
            ' {cidr: "::/0", except: ["2001:db8:51::/48"]}]}',
            '{fromEntities: [world], toPorts: [{ports: [{port: "80"}]}]}',
        ),
        yes="client>a:80/tcp server>a:81/tcp",
        no="client>a:81/tcp",
    ),
    make_case(
        "a CIDR and ports of one rule must both match",
        ingress(
            f'{{fromCIDR: [{BLOCK}, "{BLOCK6}"], toPorts: [{{ports: [{{port: "80", protocol: TCP}}]}}]}}'
        ),
        yes="client>a:80/tcp",
        no="client>a:81/tcp server>a:80/tcp client>a:80/udp",
    ),
    make_case(
        "toCIDR means addresses of the world",
        egress('{toCIDR: [203.0.113.0/24, "2001:db8:113::/48"]}'),
        yes="a>server:443/tcp",
        no="a>client:443/tcp a>b:80/tcp",
    ),
    make_case(
        "toCIDRSet of everything but private addresses",
        egress(
            "{toCIDRSet: [{cidr: 0.0.0.0/0, except: [10.0.0.0/8, 198.51.100.0/24]},"
            ' {cidr: "::/0", except: ["fd00::/8", "2001:db8:51::/48"]}]}'
        ),
        yes="a>server:443/tcp",
        no="a>client:443/tcp a>b:80/tcp a>host:22/tcp",
    ),
    make_case(
        "a CIDR group is named by cidrGroupRef",
        cidr_group("partners", BLOCK, BLOCK6),
        ingress("{fromCIDRSet: [{cidrGroupRef: partners}]}"),
        yes="client>a:80/tcp",
        no="server>a:80/tcp b>a:80/tcp",
    ),
    make_case(
        "a CIDR group that does not exist means nobody",
        cidr_group("partners", BLOCK, BLOCK6),
        ingress("{fromCIDRSet: [{cidrGroupRef: others}]}"),
        no="client>a:80/tcp server>a:80/tcp",
    ),
    make_case(
        "an empty CIDR group means nobody",
        cidr_group("partners"),
        ingress("{fromCIDRSet: [{cidrGroupRef: partners}]}"),
        no="client>a:80/tcp",
    ),
    make_case(
        "a CIDR group never means a pod",
        cidr_group("partners", "0.0.0.0/0", "::/0"),
        ingress("{fromCIDRSet: [{cidrGroupRef: partners}]}"),
        yes="client>a:80/tcp",
        no="b>a:80/tcp remote>a:80/tcp",
    ),
    make_case(
        "exceptions hold for CIDR groups",
        cidr_group("partners", "0.0.0.0/0", "::/0"),
        ingress(
            "{fromCIDRSet: [{cidrGroupRef: partners,"
            ' except: [198.51.100.0/24, "2001:db8:51::/48"]}]}'
        ),
        yes="server>a:80/tcp",
        no="client>a:80/tcp",
    ),
    make_case(
        "CIDR groups are selected by their labels",
        cidr_group("one", BLOCK, BLOCK6, labels="{kind: partner}"),
        cidr_group("two", "203.0.113.0/24", "2001:db8:113::/48", labels="{kind: own}"),
        ingress("{fromCIDRSet: [{cidrGroupSelector: {matchLabels: {kind: partner}}}]}"),
        yes="client>a:80/tcp",
        no="server>a:80/tcp",
    ),
    make_case(
        "an empty selector of CIDR groups means all of them",
        cidr_group("one", BLOCK, BLOCK6, labels="{kind: partner}"),
        cidr_group("two", "203.0.113.0/24", "2001:db8:113::/48"),
        ingress("{fromCIDRSet: [{cidrGroupSelector: {}}]}"),
        yes="client>a:80/tcp server>a:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "CIDR groups are selected by expressions",
        cidr_group("one", BLOCK, BLOCK6, labels="{kind: partner}"),
        cidr_group("two", "203.0.113.0/24", "2001:db8:113::/48"),
        ingress(
            "{fromCIDRSet: [{cidrGroupSelector: {matchExpressions:"
            " [{key: kind, operator: DoesNotExist}]}}]}"
        ),
        yes="server>a:80/tcp",
        no="client>a:80/tcp",
    ),
    make_case(
        "a CIDR group may be where one may send",
        cidr_group("partners", "203.0.113.20", "2001:db8:113::20"),
        egress('{toCIDRSet: [{cidrGroupRef: partners}], toPorts: [{ports: [{port: "443"}]}]}'),
        yes="a>server:443/tcp",
        no="a>server:80/tcp a>client:443/tcp",
    ),
]

PORTS: Final[list[Case]] = [
    make_case(
        "a port without a protocol is of TCP UDP and SCTP",
        on_ports('[{port: "80"}]'),
        yes="b>a:80/tcp b>a:80/udp b>a:80/sctp client>a:80/tcp",
        no="b>a:81/tcp b>a:ping",
    ),
    make_case(
        "the protocol ANY is TCP UDP and SCTP",
        on_ports('[{port: "80", protocol: ANY}]'),
        yes="b>a:80/tcp b>a:80/udp b>a:80/sctp",
        no="b>a:81/udp b>a:ping",
    ),
    make_case(
        "a port of TCP is of TCP only",
        on_ports('[{port: "80", protocol: TCP}]'),
        yes="b>a:80/tcp",
        no="b>a:80/udp b>a:80/sctp",
    ),
    make_case(
        "a port of UDP is of UDP only",
        on_ports('[{port: "53", protocol: UDP}]'),
        yes="b>a:53/udp",
        no="b>a:53/tcp b>a:53/sctp",
    ),
    make_case(
        "a port of SCTP is of SCTP only",
        on_ports('[{port: "5000", protocol: SCTP}]'),
        yes="b>a:5000/sctp",
        no="b>a:5000/tcp b>a:5000/udp",
    ),
    make_case(
        "port zero of a protocol means all its ports",
        on_ports('[{port: "0", protocol: UDP}]'),
        yes="b>a:1/udp b>a:65535/udp",
        no="b>a:80/tcp b>a:ping",
    ),
    make_case(
        "port zero of any protocol means all ports and no ping",
        on_ports('[{port: "0"}]'),
        yes="b>a:80/tcp b>a:53/udp b>a:5000/sctp",
        no="b>a:ping",
    ),
    make_case(
        "endPort zero is no range",
        on_ports('[{port: "80", endPort: 0}]'),
        yes="b>a:80/tcp",
        no="b>a:81/tcp b>a:79/tcp",
    ),
    make_case(
        "a range includes both ends",
        on_ports('[{port: "8080", endPort: 8099, protocol: TCP}]'),
        yes="b>a:8080/tcp b>a:8095/tcp b>a:8096/tcp b>a:8099/tcp",
        no="b>a:8079/tcp b>a:8100/tcp b>a:8080/udp",
    ),
    make_case(
        "a range without a protocol is of all three",
        on_ports('[{port: "1000", endPort: 2000}]'),
        yes="b>a:1000/tcp b>a:1500/udp b>a:2000/sctp",
        no="b>a:2001/udp b>a:999/sctp",
    ),
    make_case(
        "a range up to the last port",
        on_ports('[{port: "32768", endPort: 65535, protocol: TCP}]'),
        yes="b>a:32768/tcp b>a:65535/tcp",
        no="b>a:32767/tcp",
    ),
    make_case(
        "several ports are alternatives",
        on_ports('[{port: "80", protocol: TCP}, {port: "53", protocol: UDP}]'),
        yes="b>a:80/tcp b>a:53/udp",
        no="b>a:53/tcp b>a:80/udp",
    ),
    make_case(
        "several elements of toPorts are alternatives",
        ingress(
            '{toPorts: [{ports: [{port: "80", protocol: TCP}]}, {ports: [{port: "53", protocol: UDP}]}]}'
        ),
        yes="b>a:80/tcp b>a:53/udp",
        no="b>a:81/tcp",
    ),
    make_case(
        "an empty toPorts means everything",
        ingress("{fromEndpoints: [{matchLabels: {app: b}}], toPorts: []}"),
        yes="b>a:80/tcp b>a:ping",
        no="c>a:80/tcp",
    ),
    make_case(
        "an empty toPorts without peers says nothing",
        ingress("{toPorts: []}"),
        no="b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "toPorts without peers means everybody",
        on_ports('[{port: "80", protocol: TCP}]'),
        yes="b>a:80/tcp red/b>a:80/tcp client>a:80/tcp remote>a:80/tcp unmanaged>a:80/tcp",
    ),
    make_case(
        "peers without ports means every protocol",
        ingress("{fromEndpoints: [{matchLabels: {app: b}}]}"),
        yes="b>a:1/tcp b>a:65535/udp b>a:7/sctp b>a:ping",
    ),
    make_case(
        "a named port of ingress is the subject's own",
        on_ports("[{port: http, protocol: TCP}]"),
        yes="b>a:8080/tcp",
        no="b>a:8081/tcp b>a:80/tcp",
    ),
    make_case(
        "a named port without a protocol is of the protocol the pod gives it",
        on_ports("[{port: dns}]"),
        yes="b>a:5353/udp",
        no="b>a:5353/tcp",
    ),
    make_case(
        "a named port with another protocol opens nothing",
        on_ports("[{port: dns, protocol: TCP}]"),
        no="b>a:5353/udp b>a:5353/tcp",
    ),
    make_case(
        "names of ports have no case",
        on_ports("[{port: HTTP, protocol: TCP}]"),
        yes="b>a:8080/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "a named port of egress is each peer's own",
        egress("{toEndpoints: [{}], toPorts: [{ports: [{port: http, protocol: TCP}]}]}"),
        yes="a>b:8081/tcp",
        no="a>b:8080/tcp a>c:8080/tcp a>red/b:8081/tcp",
    ),
    make_case(
        "a named port of egress opens nothing towards the world",
        egress("{toEntities: [all], toPorts: [{ports: [{port: http, protocol: TCP}]}]}"),
        yes="a>b:8081/tcp a>red/a:8080/tcp",
        no="a>server:8080/tcp a>host:8080/tcp",
    ),
    make_case(
        "peers and ports of one rule must both match",
        ingress(
            '{fromEndpoints: [{matchLabels: {app: b}}], toPorts: [{ports: [{port: "80"}]}]}',
            '{fromEndpoints: [{matchLabels: {app: c}}], toPorts: [{ports: [{port: "443"}]}]}',
        ),
        yes="b>a:80/tcp c>a:443/tcp",
        no="b>a:443/tcp c>a:80/tcp",
    ),
]

PINGS: Final[list[Case]] = [
    make_case(
        "an echo request may be named by number",
        ingress("{icmps: [{fields: [{type: 8}, {family: IPv6, type: 128}]}]}"),
        yes="b>a:ping client>a:ping",
        no="b>a:80/tcp b>a:53/udp",
    ),
    make_case(
        "an echo request may be named by name",
        ingress("{icmps: [{fields: [{type: EchoRequest}, {family: IPv6, type: EchoRequest}]}]}"),
        yes="b>a:ping",
        no="b>a:80/tcp",
    ),
    make_case(
        "a type without a family is of IPv4",
        ingress("{icmps: [{fields: [{type: 128}]}]}"),
        yes="b>a:128/icmp",
        no="b>a:ping b>a:128/icmp6",
    ),
    make_case(
        "a type of IPv6 is none of IPv4",
        ingress("{icmps: [{fields: [{family: IPv6, type: 8}]}]}"),
        yes="b>a:8/icmp6",
        no="b>a:8/icmp b>a:ping",
    ),
    make_case(
        "another type is not an echo request",
        ingress("{icmps: [{fields: [{type: 13}, {family: IPv6, type: 139}]}]}"),
        yes="b>a:13/icmp b>a:139/icmp6",
        no="b>a:ping b>a:14/icmp b>a:138/icmp6",
    ),
    make_case(
        "type zero is a type and not every type",
        ingress("{icmps: [{fields: [{type: 0}]}]}"),
        yes="b>a:0/icmp",
        no="b>a:ping b>a:1/icmp b>a:0/icmp6",
    ),
    make_case(
        "a type may be a number in quotes",
        ingress('{icmps: [{fields: [{type: "8"}, {family: IPv6, type: "128"}]}]}'),
        yes="b>a:ping",
        no="b>a:9/icmp",
    ),
    make_case(
        "names of types differ by family",
        ingress("{icmps: [{fields: [{type: TimeExceeded}, {family: IPv6, type: TimeExceeded}]}]}"),
        yes="b>a:11/icmp b>a:3/icmp6",
        no="b>a:3/icmp b>a:11/icmp6",
    ),
    make_case(
        "peers and types of one rule must both match",
        ingress(
            "{fromEndpoints: [{matchLabels: {app: b}}],"
            " icmps: [{fields: [{type: 8}, {family: IPv6, type: 128}]}]}"
        ),
        yes="b>a:ping",
        no="c>a:ping b>a:80/tcp",
    ),
    make_case(
        "icmps of egress hold for what is sent",
        egress("{icmps: [{fields: [{type: 8}, {family: IPv6, type: 128}]}]}"),
        yes="a>b:ping a>server:ping",
        no="a>b:80/tcp",
    ),
    make_case(
        "an empty icmps means everything",
        ingress("{fromEndpoints: [{matchLabels: {app: b}}], icmps: []}"),
        yes="b>a:ping b>a:80/tcp",
        no="c>a:ping",
    ),
    make_case(
        "pings may be denied while all else is allowed",
        ingress(OPEN, deny="{icmps: [{fields: [{type: 8}, {family: IPv6, type: 128}]}]}"),
        yes="b>a:80/tcp b>a:53/udp",
        no="b>a:ping client>a:ping",
    ),
    make_case(
        "pings stand in a rule of their own beside ports",
        ingress(
            '{toPorts: [{ports: [{port: "80"}]}]}',
            "{icmps: [{fields: [{type: 8}, {family: IPv6, type: 128}]}]}",
        ),
        yes="b>a:80/tcp b>a:ping",
        no="b>a:81/tcp",
    ),
]

DENIALS: Final[list[Case]] = [
    make_case(
        "a denial wins over a rule that allows the same",
        ingress(OPEN, deny="{fromEndpoints: [{matchLabels: {app: b}}]}"),
        yes="c>a:80/tcp client>a:80/tcp",
        no="b>a:80/tcp b>a:ping",
    ),
    make_case(
        "a denial wins over a narrower rule that allows",
        ingress(
            '{fromEndpoints: [{matchLabels: {app: b}}], toPorts: [{ports: [{port: "80"}]}]}',
            deny="{fromEndpoints: [{}]}",
        ),
        no="b>a:80/tcp c>a:80/tcp",
    ),
    make_case(
        "a narrow denial leaves the rest of a wide rule",
        ingress(OPEN, deny='{toPorts: [{ports: [{port: "22", protocol: TCP}]}]}'),
        yes="b>a:80/tcp b>a:22/udp b>a:ping",
        no="b>a:22/tcp client>a:22/tcp",
    ),
    make_case(
        "a denial alone closes the direction",
        cnp(f"{APP_A}\ningressDeny: [{{fromEndpoints: [{{matchLabels: {{app: b}}}}]}}]"),
        yes="a>b:80/tcp",
        no="b>a:80/tcp c>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "a denial without default deny leaves the rest open",
        cnp(
            f"{APP_A}\nenableDefaultDeny: {{ingress: false}}\n"
            "ingressDeny: [{fromEndpoints: [{matchLabels: {app: b}}]}]"
        ),
        yes="c>a:80/tcp client>a:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "a denial of one policy wins over another policy",
        ingress(OPEN),
        cnp(f"{APP_A}\ningressDeny: [{{fromEntities: [world]}}]", name="q"),
        yes="b>a:80/tcp",
        no="client>a:80/tcp",
    ),
    make_case(
        "a denial wins over a NetworkPolicy",
        np("podSelector: {matchLabels: {app: a}}\ningress: [{}]"),
        cnp(
            f"{APP_A}\nenableDefaultDeny: {{ingress: false}}\n"
            "ingressDeny: [{fromEndpoints: [{matchLabels: {app: b}}]}]"
        ),
        yes="c>a:80/tcp client>a:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "a clusterwide denial wins over a namespace's own policy",
        ingress(OPEN),
        ccnp(
            f"{EVERYBODY}\nenableDefaultDeny: {{ingress: false}}\n"
            'ingressDeny: [{toPorts: [{ports: [{port: "23"}]}]}]'
        ),
        yes="b>a:80/tcp a>b:80/tcp",
        no="b>a:23/tcp a>b:23/tcp a>red/b:23/udp",
    ),
    make_case(
        "an empty rule of a denial denies nothing by itself",
        cnp(f"{APP_A}\nenableDefaultDeny: {{ingress: false}}\ningressDeny: [{{}}]"),
        yes="b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "an empty list of peers in a denial denies nobody",
        ingress(OPEN, deny="{fromEndpoints: []}"),
        yes="b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "a CIDR may be denied within a wider one that is allowed",
        ingress(
            '{fromCIDR: [0.0.0.0/0, "::/0"]}',
            deny='{fromCIDR: [198.51.100.0/24, "2001:db8:51::/48"]}',
        ),
        yes="server>a:80/tcp",
        no="client>a:80/tcp",
    ),
    make_case(
        "a wide CIDR that is denied wins over an address that is allowed",
        ingress(
            '{fromCIDR: [198.51.100.10/32, "2001:db8:51::10/128"]}',
            deny='{fromCIDR: [198.51.100.0/24, "2001:db8:51::/48"]}',
        ),
        no="client>a:80/tcp server>a:80/tcp",
    ),
    make_case(
        "a denied CIDR's exception is not denied",
        ingress(
            OPEN,
            deny="{fromCIDRSet: [{cidr: 0.0.0.0/0, except: [198.51.100.0/24]},"
            ' {cidr: "::/0", except: ["2001:db8:51::/48"]}]}',
        ),
        yes="client>a:80/tcp b>a:80/tcp",
        no="server>a:80/tcp",
    ),
    make_case(
        "a denied CIDR does not deny pods inside it",
        ingress(OPEN, deny='{fromCIDR: [0.0.0.0/0, "::/0"]}'),
        yes="b>a:80/tcp red/b>a:80/tcp remote>a:80/tcp",
        no="client>a:80/tcp",
    ),
    make_case(
        "a denied CIDR wins over an ipBlock that allows it",
        np(
            "podSelector: {matchLabels: {app: a}}\n"
            "ingress: [{from: [{ipBlock: {cidr: 198.51.100.10/32}},"
            ' {ipBlock: {cidr: "2001:db8:51::10/128"}}, {ipBlock: {cidr: 10.244.0.0/16}},'
            ' {ipBlock: {cidr: "fd10:244::/48"}}]}]'
        ),
        cnp(
            f'{APP_A}\ningressDeny: [{{fromCIDR: [0.0.0.0/0, "::/0"]}}]',
        ),
        yes="b>a:80/tcp",
        no="client>a:80/tcp",
    ),
    make_case(
        "a denied port within an open range",
        ingress(
            '{toPorts: [{ports: [{port: "8000", endPort: 8100, protocol: TCP}]}]}',
            deny='{toPorts: [{ports: [{port: "8050", protocol: TCP}]}]}',
        ),
        yes="b>a:8049/tcp b>a:8051/tcp b>a:8100/tcp",
        no="b>a:8050/tcp",
    ),
    make_case(
        "a denied range over an open port",
        ingress(
            '{toPorts: [{ports: [{port: "8050", protocol: TCP}]}]}',
            deny='{toPorts: [{ports: [{port: "8000", endPort: 8100, protocol: TCP}]}]}',
        ),
        no="b>a:8050/tcp b>a:8051/tcp",
    ),
    make_case(
        "a port may be denied to one peer",
        ingress(
            OPEN,
            deny='{fromEndpoints: [{matchLabels: {app: b}}], toPorts: [{ports: [{port: "80"}]}]}',
        ),
        yes="b>a:81/tcp c>a:80/tcp b>a:ping",
        no="b>a:80/tcp b>a:80/udp",
    ),
    make_case(
        "the world is denied while pods are allowed",
        ingress('{toPorts: [{ports: [{port: "80"}]}]}', deny="{fromEntities: [world]}"),
        yes="b>a:80/tcp remote>a:80/tcp",
        no="client>a:80/tcp b>a:81/tcp",
    ),
    make_case(
        "denying pods of all but one namespace does not deny the world",
        ingress(
            OPEN,
            deny="{fromEndpoints: [{matchExpressions: [{key: k8s:io.kubernetes.pod.namespace,"
            " operator: NotIn, values: [blue]}]}]}",
        ),
        yes="b>a:80/tcp client>a:80/tcp",
        no="red/b>a:80/tcp default/b>a:80/tcp",
    ),
    make_case(
        "egress to a CIDR is denied",
        egress("{toEntities: [all]}", deny='{toCIDR: [203.0.113.0/24, "2001:db8:113::/48"]}'),
        yes="a>client:443/tcp a>b:80/tcp",
        no="a>server:443/tcp",
    ),
    make_case(
        "egress to the own node is denied",
        egress("{toEntities: [all]}", deny="{toEntities: [host]}"),
        yes="a>b:80/tcp a>server:443/tcp a>remote:22/tcp",
        no="a>host:22/tcp",
    ),
    make_case(
        "egress to other namespaces is denied",
        egress(
            "{toEntities: [all]}",
            deny="{toEndpoints: [{matchLabels: {k8s:io.kubernetes.pod.namespace: red}}]}",
        ),
        yes="a>b:80/tcp a>default/b:80/tcp",
        no="a>red/b:80/tcp",
    ),
    make_case(
        "a denied named port is each subject's own",
        cnp(
            f"{EVERYBODY}\ningress: [{OPEN}]\n"
            "ingressDeny: [{toPorts: [{ports: [{port: http, protocol: TCP}]}]}]"
        ),
        yes="c>a:8081/tcp c>b:8080/tcp a>c:8080/tcp",
        no="c>a:8080/tcp c>b:8081/tcp",
    ),
    make_case(
        "a CIDR group may be denied",
        cidr_group("bad", "198.51.100.0/24", "2001:db8:51::/48"),
        ingress(OPEN, deny="{fromCIDRSet: [{cidrGroupRef: bad}]}"),
        yes="server>a:80/tcp b>a:80/tcp",
        no="client>a:80/tcp",
    ),
]

DEFAULTS: Final[list[Case]] = [
    make_case(
        "rules without default deny leave a pod open",
        ingress(
            '{toPorts: [{ports: [{port: "80"}]}]}', extra="enableDefaultDeny: {ingress: false}"
        ),
        yes="b>a:80/tcp b>a:81/tcp client>a:53/udp",
    ),
    make_case(
        "default deny may be asked for in a direction without rules",
        ingress(OPEN, extra="enableDefaultDeny: {egress: true}"),
        yes="b>a:80/tcp",
        no="a>b:80/tcp a>server:80/tcp",
    ),
    make_case(
        "default deny that is asked for changes nothing where there are rules",
        ingress('{toPorts: [{ports: [{port: "80"}]}]}', extra="enableDefaultDeny: {ingress: true}"),
        yes="b>a:80/tcp a>b:80/tcp",
        no="b>a:81/tcp",
    ),
    make_case(
        "default deny is given up in one direction only",
        cnp(
            f"{APP_A}\nenableDefaultDeny: {{egress: false}}\n"
            "ingress: [{}]\negress: [{toEndpoints: [{matchLabels: {app: b}}]}]"
        ),
        yes="a>b:80/tcp a>c:80/tcp a>server:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "another policy with default deny closes the pod all the same",
        ingress(
            '{toPorts: [{ports: [{port: "80"}]}]}', extra="enableDefaultDeny: {ingress: false}"
        ),
        cnp(f"{APP_A}\ningress: [{{}}]", name="q"),
        yes="b>a:80/tcp",
        no="b>a:81/tcp",
    ),
    make_case(
        "a NetworkPolicy closes a pod beside a policy without default deny",
        ingress(
            '{toPorts: [{ports: [{port: "80"}]}]}', extra="enableDefaultDeny: {ingress: false}"
        ),
        np("podSelector: {matchLabels: {app: a}}"),
        yes="b>a:80/tcp b>a:80/udp",
        no="b>a:81/tcp",
    ),
    make_case(
        "an empty enableDefaultDeny is as if it were missing",
        ingress("{}", extra="enableDefaultDeny: {}"),
        yes="a>b:80/tcp",
        no="b>a:80/tcp",
    ),
    make_case(
        "a clusterwide allowance without default deny opens what others close",
        np("podSelector: {}"),
        ccnp(
            f"{EVERYBODY}\nenableDefaultDeny: {{ingress: false, egress: false}}\n"
            "ingress: [{fromEndpoints: [{matchLabels:"
            " {k8s:io.kubernetes.pod.namespace: red}}],"
            ' toPorts: [{ports: [{port: "9090", protocol: TCP}]}]}]'
        ),
        yes="red/a>a:9090/tcp b>red/a:80/tcp b>default/c:80/tcp",
        no="red/a>a:80/tcp b>a:9090/tcp",
    ),
]

TOGETHER: Final[list[Case]] = [
    make_case(
        "a namespace whose pods talk among themselves only",
        cnp(
            f"{EVERYBODY}\ningress: [{{fromEndpoints: [{{}}]}}]\negress: [{{toEndpoints: [{{}}]}}]"
        ),
        yes="a>b:80/tcp c>a:53/udp b>c:ping",
        no="red/a>a:80/tcp a>red/a:80/tcp client>a:80/tcp a>server:443/tcp",
    ),
    make_case(
        "only the proxy reaches the database",
        cnp(
            "endpointSelector: {matchLabels: {example.com/role: db}}\n"
            "ingress: [{fromEndpoints: [{matchLabels: {app: b}}],"
            ' toPorts: [{ports: [{port: "5432", protocol: TCP}]}]}]'
        ),
        yes="b>c:5432/tcp a>b:80/tcp",
        no="a>c:5432/tcp b>c:22/tcp client>c:5432/tcp red/b>c:5432/tcp",
    ),
    make_case(
        "policies of both kinds add up",
        np(
            "podSelector: {matchLabels: {app: a}}\n"
            "ingress: [{from: [{podSelector: {matchLabels: {app: b}}}]}]"
        ),
        ingress("{fromEndpoints: [{matchLabels: {app: c}}]}"),
        yes="b>a:80/tcp c>a:80/tcp",
        no="red/b>a:80/tcp client>a:80/tcp",
    ),
    make_case(
        "clusterwide and namespaced policies add up",
        ccnp(f"{APP_A}\ningress: [{{fromEntities: [world]}}]"),
        ingress("{fromEndpoints: [{matchLabels: {app: b}}]}"),
        yes="client>a:80/tcp b>a:80/tcp client>red/a:80/tcp",
        no="c>a:80/tcp b>red/a:80/tcp",
    ),
    make_case(
        "rules of one policy add up",
        ingress("{fromEndpoints: [{matchLabels: {app: b}}]}", "{fromEntities: [world]}"),
        yes="b>a:80/tcp client>a:80/tcp",
        no="c>a:80/tcp",
    ),
    make_case(
        "an empty rule beside others takes nothing away",
        ingress("{}", "{fromEndpoints: [{matchLabels: {app: b}}]}"),
        yes="b>a:80/tcp",
        no="c>a:80/tcp",
    ),
    make_case(
        "egress and ingress must both allow a flow",
        egress("{toEndpoints: [{matchLabels: {app: b}}]}"),
        cnp(
            "endpointSelector: {matchLabels: {app: b}}\n"
            'ingress: [{fromEndpoints: [{matchLabels: {app: a}}], toPorts: [{ports: [{port: "80"}]}]}]',
            name="q",
        ),
        yes="a>b:80/tcp a>b:80/udp",
        no="a>b:81/tcp c>b:80/tcp a>c:80/tcp",
    ),
    make_case(
        "a denial at the source is enough",
        egress("{toEntities: [all]}", deny="{toEndpoints: [{matchLabels: {app: b}}]}"),
        cnp(
            f"endpointSelector: {{matchLabels: {{app: b}}}}\ningress: [{OPEN}]",
            name="q",
        ),
        yes="a>c:80/tcp c>b:80/tcp",
        no="a>b:80/tcp",
    ),
    make_case(
        "answers pass although the way back is denied",
        cnp(
            f"{APP_A}\nenableDefaultDeny: {{egress: false}}\n"
            "egressDeny: [{toEndpoints: [{matchLabels: {app: b}}]}]"
        ),
        yes="b>a:80/tcp b>a:53/udp",
        no="a>b:80/tcp",
    ),
    make_case(
        "a world that may reach a port while the cluster may reach all",
        ingress(
            "{fromEntities: [cluster]}",
            '{fromEntities: [world], toPorts: [{ports: [{port: "443", protocol: TCP}]}]}',
        ),
        yes="b>a:22/tcp red/c>a:80/tcp client>a:443/tcp",
        no="client>a:80/tcp client>a:443/udp",
    ),
    make_case(
        "a pod that may reach name servers and one site",
        egress(
            "{toEndpoints: [{matchLabels: {k8s:io.kubernetes.pod.namespace: red, app: c}}],"
            ' toPorts: [{ports: [{port: "53"}]}]}',
            '{toCIDRSet: [{cidr: 203.0.113.0/24}, {cidr: "2001:db8:113::/48"}],'
            ' toPorts: [{ports: [{port: "443", protocol: TCP}]}]}',
        ),
        yes="a>red/c:53/udp a>red/c:53/tcp a>server:443/tcp",
        no="a>red/c:80/tcp a>server:53/udp a>client:443/tcp a>b:53/udp",
    ),
]

CASES: Final = [
    *SUBJECTS,
    *ENDPOINTS,
    *ENTITIES,
    *BLOCKS,
    *PORTS,
    *PINGS,
    *DENIALS,
    *DEFAULTS,
    *TOGETHER,
]
