/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* abi.h: every struct and number that the programs share with the agent, and nothing else.
 *
 * podwire/datapath/abi.py is generated from the BTF of these types (scripts/generate-abi); a test fails when it is
 * stale. Change a layout: raise PW_ABI_VERSION, which moves the pins to another directory (docs/restore.md). Addresses
 * are 16 bytes, IPv4 as v4-mapped (::ffff:a.b.c.d). _be = network byte order; everything else is host order. No row
 * says where a packet's headers begin: that is a constant of the programs (pw_link_header_bytes in flow.h), set at the
 * load, so that devices of other link types need no other layout. No implicit padding: every hole is a named field,
 * because map keys are compared byte by byte.
 */
#ifndef PODWIRE_ABI_H
#define PODWIRE_ABI_H

#include <linux/bpf.h>
#include <linux/types.h>

#define PW_ABI_VERSION 3
/* The oldest build that may take these rows over, field by field, when a node goes back (docs/restore.md). Raise it
 * together with the version when a new layout's rows mean something else under an old field's name, or need a field
 * that may not be dropped. The hash that chooses a conntrack shard is part of this promise.
 */
#define PW_ABI_OLDEST_READER 1
#define PW_CONNTRACK_SHARDS  64
/* Of pw_conntrack's rows one in so many is spare: from there on everybody's quota shrinks (shards.h) */
#define PW_SPARE_PART 4

/* skb->mark between two programs of ours: the sender's one has judged both sides already (rule 7) */
#define PW_MARK_JUDGED 0x70770001
/* and on a pod's IPv6 fragments in the stack, which forgets the device that they came by (identity.h) */
#define PW_MARK_POD_PIECE 0x70770002
/* Bits that others set on what passes the stack: kube-proxy and the kubelet */
#define PW_MARK_FOREIGN_BITS 0xc000

/* Set in a CIDR's identity when its rows are looked up for a peer that is outside the cluster */
#define PW_CIDR_WORLD_BIT 0x2000000

/* The first identity that is not reserved */
#define PW_IDENTITY_FIXED_FIRST 256

/* Seen from the pod: egress = what it sends. */
enum pw_direction {
	PW_EGRESS = 0,
	PW_INGRESS = 1,
};

enum pw_hook {
	PW_HOOK_FROM_POD = 0,
	PW_HOOK_TO_POD = 1,
	PW_HOOK_FROM_OVERLAY = 2,
	PW_HOOK_TO_OVERLAY = 3,
	PW_HOOK_FROM_NETDEV = 4,
	PW_HOOK_TO_NETDEV = 5,
};

/* How a flow came, and how its replies must leave (docs/datapath.md, rule 2). */
enum pw_path {
	PW_PATH_NONE = 0,
	PW_PATH_LOCAL = 1,
	PW_PATH_STACK = 2,
	PW_PATH_TUNNEL = 3,
	PW_PATH_NATIVE = 4,
};

enum pw_identity {
	PW_IDENTITY_UNKNOWN = 0,
	PW_IDENTITY_HOST = 1,
	PW_IDENTITY_WORLD = 2,
	PW_IDENTITY_UNMANAGED = 3,
	PW_IDENTITY_HEALTH = 4,
	PW_IDENTITY_INIT = 5,
	PW_IDENTITY_REMOTE_NODE = 6,
	PW_IDENTITY_SELF =
		0xffffffff, /* as a peer: the endpoint itself, whom no policy keeps away */
};

/* Why a packet did not pass. 0 = it passed. Append only; podwire names them by what stands after PW_DROP_. */
enum pw_drop_reason {
	PW_DROP_NONE = 0,
	PW_DROP_NO_ENDPOINT = 1, /* no row, or the row is still the guard */
	PW_DROP_TRUNCATED = 2,	 /* a header ends before it should */
	PW_DROP_ETHERTYPE = 3,	 /* neither ARP, IPv4 nor IPv6; VLAN tags included */
	PW_DROP_SOURCE_MAC = 4,
	PW_DROP_SOURCE_ADDRESS = 5,
	PW_DROP_DESTINATION_MAC = 6,
	PW_DROP_ARP = 7,       /* anything but a request of the pod itself */
	PW_DROP_NEIGHBOUR = 8, /* neighbour discovery that is not allowed, or forged */
	PW_DROP_GATEWAY = 9,   /* to the gateway's address, and no echo */
	PW_DROP_QUIET = 10,    /* multicast chatter: MLD, RS, mDNS, DHCP, broadcast */
	PW_DROP_HEADER = 11,   /* malformed: version, lengths, extension header chain */
	PW_DROP_PROTOCOL = 12,
	PW_DROP_FRAGMENT = 13, /* a later fragment whose first one was not seen */
	PW_DROP_POLICY = 14,
	PW_DROP_CONNTRACK_FULL = 15,
	PW_DROP_CONNTRACK_QUOTA = 16,
	PW_DROP_MTU = 17, /* too big; an ICMP error was sent where that is allowed */
	PW_DROP_TTL = 18,
	PW_DROP_NO_POD = 19,	    /* an address of an own block that no endpoint has */
	PW_DROP_TUNNEL_PORT = 20,   /* a pod that talks to a tunnel port */
	PW_DROP_INTERNAL = 21,	    /* a helper failed */
	PW_DROP_DESTINATION = 22,   /* loopback, unspecified, link-local that is not the gateway */
	PW_DROP_TUNNEL_SOURCE = 23, /* the outer source is no known node */
	PW_DROP_TUNNEL_IDENTITY = 24, /* the tunnel key is none that this sender may use */
	PW_DROP_TUNNEL_INNER = 25, /* the inner source lives elsewhere, or nothing is known of it */
	PW_DROP_NO_NODE = 26,	   /* at the tunnel device, and no node has the destination */
	PW_DROP_REDIRECT = 27,	   /* an ICMP redirect: pods have one gateway */
	PW_DROP_NO_BACK_END = 28,  /* a service without back ends: refused */
	PW_DROP_NO_SERVICE_PORT = 29, /* an address of a service, and none of its ports: refused */
	PW_DROP_NOT_ENCRYPTED = 30,   /* its node's row asks for what nothing here does */
	PW_DROP_REASONS,
};

enum pw_event_kind {
	PW_EVENT_DROP = 1,
	PW_EVENT_TRACE = 2,
	PW_EVENT_POLICY = 3,
};

enum pw_config_flags {
	PW_CONFIG_OPEN = 1 << 0,	/* unset = guard: everything is dropped */
	PW_CONFIG_DENY_EGRESS = 1 << 1, /* default of the direction when no rule matches */
	PW_CONFIG_DENY_INGRESS = 1 << 2,
	PW_CONFIG_SHAPED = 1 << 3, /* reached through the host device's egress queue (rule 7) */
	PW_CONFIG_AUDIT = 1 << 4,
	PW_CONFIG_HOST_ALLOWED = 1 << 5,
	PW_CONFIG_CIDR_EGRESS = 1 << 6,
	PW_CONFIG_CIDR_INGRESS = 1 << 7,
	PW_CONFIG_TRACE = 1 << 8,
};

enum pw_ipcache_flags {
	PW_IPCACHE_TUNNEL = 1 << 0,
	PW_IPCACHE_NATIVE = 1 << 1,
	PW_IPCACHE_LOCAL = 1 << 2, /* a block of this node: no endpoint row, nobody there */
	PW_IPCACHE_NODE_ADDRESS = 1 << 3,
	PW_IPCACHE_DIRECT = 1 << 4, /* natively, and past the stack: its node's row has the hop */
};

enum pw_node_flags {
	PW_NODE_CLASSIC = 1 << 0,   /* speaks VNI 1 and says no identity */
	PW_NODE_ENCRYPTED = 1 << 1, /* what goes there has to be encrypted on the way */
};

enum pw_tcp_state {
	PW_TCP_NONE = 0,	/* not TCP */
	PW_TCP_OPENING = 1,	/* only the opener has spoken */
	PW_TCP_ANSWERED = 2,	/* the other side has answered */
	PW_TCP_ESTABLISHED = 3, /* and the opener has confirmed */
	PW_TCP_HALF_CLOSED = 4, /* one side has sent FIN */
	PW_TCP_CLOSED = 5,	/* both have, or one has sent RST */
};

enum pw_conntrack_flags {
	PW_CONNTRACK_REPLIED = 1 << 0,
	PW_CONNTRACK_FIN_ORIGINAL = 1 << 1,
	PW_CONNTRACK_FIN_REPLY = 1 << 2,
	PW_CONNTRACK_PICKED_UP = 1 << 3,  /* began in mid-stream: stays on the stack (rule 3) */
	PW_CONNTRACK_EXPIRED = 1 << 4,	  /* the collector deletes it on its next round */
	PW_CONNTRACK_TRANSLATED = 1 << 5, /* by the stack: shows answers the way, allows nothing */
	PW_CONNTRACK_NEW = 1 << 6,	  /* stands in pw_new_flows */
	PW_CONNTRACK_LEFT =
		1 << 7, /* for good: its flow stands elsewhere, or its ports are another's */
	PW_CONNTRACK_CONNECTION = 1 << 8, /* both sides have shown that they want it */
	PW_CONNTRACK_UNPROTECTED =
		1 << 9, /* a connection that found no room in pw_conntrack so far */
};

/* What a row of conntrack stands for. A flow that a service translates has two, which go together. */
enum pw_conntrack_kind {
	PW_CONNTRACK_PLAIN = 0,
	PW_CONNTRACK_SERVICE = 1,     /* the tuple as the pod has it: to the service */
	PW_CONNTRACK_OF_BACK_END = 2, /* the tuple as the back end has it */
	PW_CONNTRACK_OF_ITSELF = 3,   /* the tuple of the pod's answers, where it is the back end */
};

/* What a row of pw_conntrack counts among. */
enum pw_charge {
	PW_CHARGE_NONE = 0,
	PW_CHARGE_CONNECTION = 1,
	PW_CHARGE_BRIEF = 2, /* translated, and no connection yet or no longer */
};

/* What a row of pw_policy says. Anything else denies. */
enum pw_policy_verdict {
	PW_POLICY_ALLOW = 1,
	PW_POLICY_DENY = 2,
};

enum pw_policy_flags {
	PW_POLICY_FINAL = 1 << 0, /* no later family of rows is asked */
	PW_POLICY_AUDIT = 1 << 1, /* a denial that is told and not carried out */
};

/* What a program did with a packet. */
enum pw_action {
	PW_ACTION_DROP = 0,
	PW_ACTION_STACK = 1,  /* on to the host's stack, or, at to_pod, on to the pod */
	PW_ACTION_PEER = 2,   /* straight into the target pod */
	PW_ACTION_EGRESS = 3, /* to the host device of the target pod, past its queue */
	PW_ACTION_ANSWER = 4, /* back to the sender, as an answer or an ICMP error */
	PW_ACTION_TUNNEL = 5, /* to another node, through the tunnel device */
	PW_ACTION_NATIVE = 6, /* to another node as it is, past the stack */
};

enum pw_settings_flags {
	PW_SETTINGS_SERVICES = 1 << 0,	 /* pw_services has rows: new flows are looked up there */
	PW_SETTINGS_UNATTENDED = 1 << 1, /* new flows go where an earlier build finds them */
	PW_SETTINGS_MOVING = 1 << 2,	 /* rows of flows are on their way from other hashes */
};

/* node-wide knobs, one row */
struct pw_settings {
	__u32 conntrack_quota; /* connections that an endpoint opened, and as many that others opened to it */
	__u32 tunnel_port; /* guarded UDP port, 0 = none */
	__u32 flags;	   /* enum pw_settings_flags */
	__u32 hash_seed; /* random, chosen once: entries are found under it as long as they live */
	__u32 tunnel_ifindex; /* the flow-based tunnel device, 0 = none */
	__u32 native_ifindex; /* where native packets pass by the stack, 0 = nowhere */
	__u32 tunnel_mark; /* random, chosen once: on what enters the tunnel by a program of ours */
	__u32 new_flow_rate; /* flows each second that an endpoint's side is remembered for */
};

struct pw_endpoint_key {
	__u8 addr[16];
};

struct pw_endpoint_value {
	__u32 ifindex; /* host device */
	__u32 instance;
	__u8 pod_mac[6];
	__u8 host_mac[6];
	__u32 flags;
};

/* key: u32 ifindex of the host device. Rows of live endpoints are written with BPF_F_LOCK (rule 20).
 * The index is in the row too: a program that holds a row which was deleted and given to another device sees it.
 */
struct pw_config_value {
	struct bpf_spin_lock lock;
	__u32 ifindex;
	__u32 instance;
	__u32 identity;
	__u32 slot; /* policy slot, 0 = none */
	__u32 policy_revision;
	__u32 mtu;
	__u32 flags;
	__u32 default_rule_egress;
	__u32 default_rule_ingress;
	__u8 ipv6[16]; /* network order, all zero = none */
	__u8 ipv4[4];  /* network order, all zero = none */
	__u8 pod_mac[6];
	__u8 host_mac[6];
} __attribute__((aligned(8)));

struct pw_prefix_key {
	__u32 prefix_bits; /* of the 16 bytes: an IPv4 /24 is 120 */
	__u8 addr[16];
};

/* A trie compares from the left: 64 bits name slot and identity (0 = whoever the peer is), 72 also the direction, 80 the
 * protocol, 81 to 96 a prefix of the port (ICMP: type and code). Questions have all 96.
 */
struct pw_policy_key {
	__u32 prefix_bits;
	__u32 slot;
	__u32 identity;
	__u8 direction; /* enum pw_direction */
	__u8 protocol;
	__be16 port_be;
};

struct pw_policy_value {
	__u32 precedence; /* of two rows that cover a packet the higher one decides, then a denial */
	__u32 rule;
	__u8 verdict;	  /* enum pw_policy_verdict */
	__u8 flags;	  /* enum pw_policy_flags */
	__u8 prefix_bits; /* of the row's own key: a look-up by key may give a shorter one's row */
	__u8 pad[5];
};

struct pw_ipcache_value {
	__u32 identity;
	__u32 node;
	__u32 flags;
	__u32 mtu;
};

/* key: u32 number of the node, as ipcache rows and conntrack entries name it */
struct pw_node_value {
	__u8 addr[16]; /* outer address, v4-mapped */
	__u32 mtu;     /* of a pod's packet that fits through the tunnel, 0 = no limit known */
	__u32 flags;   /* enum pw_node_flags */
	__u8 mac[6];   /* of its tunnel device; asked for classic peers only */
	__u16 pad;
	__u8 hop_ipv6[16]; /* towards its pods, natively; network order, all zero = none */
	__u8 hop_ipv4[4];
};

/* `beside` is 1 in the key of one kind of row: the PW_CONNTRACK_SERVICE row of a flow that a pod opened to a back end
 * itself, when a service's flow to that back end has the same ports already. Else it is 0.
 */
struct pw_conntrack_key {
	__u32 instance;
	__u8 direction;
	__u8 protocol;
	__u16 beside;
	__u8 saddr[16];
	__u8 daddr[16];
	__be16 sport_be;
	__be16 dport_be;
};

/* policy_revision and peer_identity are one judgement: written and compared as one 8-byte word (rule 6). Rows of
 * pw_conntrack and of pw_new_flows have one form.
 */
struct pw_conntrack_value {
	__u64 last_seen_ns; /* CLOCK_MONOTONIC at the last tick */
	__u32 policy_revision;
	__u32 peer_identity;
	__u32 lifetime_s; /* without a packet */
	__u32 rule;
	__u64 packets[2]; /* original direction, reply */
	__u64 bytes[2];
	__u8 path;	/* enum pw_path */
	__u8 tcp_state; /* enum pw_tcp_state */
	__u16 flags;	/* enum pw_conntrack_flags */
	__u32 node;
	__u32 service;
	__be16 nat_sport_be;
	__be16 nat_dport_be;
	__u8 nat_addr[16];
	__u32 tag; /* of the row's own key: whoever holds a row that was given to another flow sees it */
	__u32 charged; /* enum pw_charge: what it counts among at its endpoint */
	__u32 answer; /* TCP: sequence number of the SYN-ACK, or, while it has not come, of the SYN;
		       * else when the first answer came, in ms */
	__u32 backend;
	__u8 kind; /* enum pw_conntrack_kind */
	__u8 pad[3];
	__u32 vouched; /* when its sender's node was looked up last, in quarters of a second (from_overlay) */
};

/* What pods ask for. Port and protocol 0: the address is a service's, so that its other ports are refused. */
struct pw_service_key {
	__u8 addr[16];
	__be16 port_be;
	__u8 protocol;
	__u8 pad;
};

/* Rows of live services are written with BPF_F_LOCK. The key is in the row too: a program that holds a row which was
 * deleted and given to another service sees it.
 */
struct pw_service_value {
	struct bpf_spin_lock lock;
	__u32 service;	 /* number of the list of back ends, never used twice */
	__u32 back_ends; /* in that list: slots from 0 on; 0 = refused */
	__u32 affinity_place; /* where each pod remembers who answered it last, where there is affinity */
	__u32 affinity_s; /* 0 = each flow by itself */
	__u8 addr[16];
	__be16 port_be;
	__u8 protocol;
	__u8 pad;
};

/* Set in a slot's number: no place in the list, but what says that the back end of the rest of the number is in it.
 * Lists of services with affinity have such rows; numbers of back ends leave the bit clear.
 */
#define PW_SLOT_OF_MEMBER 0x80000000

struct pw_service_slot_key {
	__u32 service;
	__u32 slot;
};

/* A pod remembers back ends of so many services with affinity. Where more share a place, the last one asked has it. */
#define PW_AFFINITY_PLACES 1024

struct pw_affinity_key {
	__u32 instance; /* of the pod that asks */
	__u32 place;	/* of the service, below PW_AFFINITY_PLACES */
};

struct pw_affinity_value {
	__u64 last_ns; /* CLOCK_BOOTTIME, when a flow was opened last */
	__u32 service; /* number of its list, which is another one when affinity was off meanwhile */
	__u32 back_end;
};

/* `service` is here too: read as one word with the back end, it shows that the row is still the one looked for. */
struct pw_service_slot_value {
	__u32 service;
	__u32 back_end;
} __attribute__((aligned(8)));

/* key: u32 number of the back end, never used twice: while its row exists, flows of datagrams may go there. */
struct pw_back_end_value {
	__u32 back_end; /* its own number; first, so that it is written first where the row's memory is used again */
	__u32 flags;
	__u8 addr[16];
	__be16 port_be;
	__u8 protocol;
	__u8 pad;
};

/* What an endpoint is remembered for each second, for each of these by itself (rate.h). */
enum pw_share {
	PW_SHARE_OPENED = 0,	    /* flows that it opened */
	PW_SHARE_KNOWN_OPENERS = 1, /* that pods, this host and nodes opened to it */
	PW_SHARE_OTHER_OPENERS = 2, /* that others did, whose addresses may be forged */
};
#define PW_OPENER_BUCKETS 32
/* One part in so many of the quota is for what services translate and is no connection: two rows of pw_conntrack each */
#define PW_BRIEF_PART 4

/* key: u32 instance. While this row exists the instance may have conntrack entries; without it they are collected.
 * Pairs are of the flows that it opened (PW_EGRESS) and of those that others opened to it (PW_INGRESS).
 */
struct pw_usage_value {
	__u32 connections[2];	  /* in pw_conntrack, each within the quota */
	__u64 shared_until_ns[3]; /* enum pw_share; CLOCK_MONOTONIC until which its rate is spent */
	__u64 opener_until_ns[PW_OPENER_BUCKETS]; /* of known openers, by their addresses' hash */
	__u64 unremembered[2];			  /* new flows that passed beyond the rates */
	__u64 unprotected[2]; /* connections that stayed among the new flows for want of room */
	__u32 event_second;   /* that `drops` and `passes` count, of CLOCK_BOOTTIME */
	__u16 drops;	      /* told in that second */
	__u16 passes;	      /* told in that second: traces and verdicts */
	__u32 events_lost;    /* since the last event that was sent */
	__u32 brief_flows;    /* PW_CHARGE_BRIEF, within PW_BRIEF_PART of the quota */
};

/* What the collector tells of itself; stands in the map pw_ct_timer behind the 16 bytes of its timer. */
struct pw_collection {
	__u64 last_tick_ns; /* CLOCK_MONOTONIC */
	__u64 examined;
	__u64 removed;
	__u64 ticks; /* one shard each: ticks % PW_CONNTRACK_SHARDS is the next one */
};

/* The index of a counter in pw_metrics is (hook * PW_METRICS_REASONS + reason) * PW_METRICS_PATHS + path. */
#define PW_METRICS_HOOKS   6
#define PW_METRICS_REASONS 48
#define PW_METRICS_PATHS   5

struct pw_counter {
	__u64 packets;
	__u64 bytes;
};

struct pw_event {
	__u64 time_ns;	/* bpf_ktime_get_boot_ns */
	__u32 instance; /* the endpoint at whose hook it happened */
	__u32 source_identity;
	__u32 destination_identity;
	__u32 length_bytes;
	__u32 rule;
	__u32 ifindex;
	__u32 policy_revision;
	__u32 lost; /* events of this endpoint that were not sent since the last one */
	__u8 kind;
	__u8 hook;
	__u8 direction;
	__u8 reason;
	__u8 path;
	__u8 protocol;
	__u8 tcp_flags;
	__u8 pad;
	__u16 ethertype;
	__u16 pad2;
	__be16 sport_be;
	__be16 dport_be;
	__u8 saddr[16];
	__u8 daddr[16];
	__u8 original_daddr[16]; /* before a service was translated, all zero = it was not */
	__be16 original_dport_be;
	__u8 source_mac[6];
};

/* Test builds only (map pw_decision): what the last packet came to, for test runs cannot see it (rule 19). */
struct pw_decision {
	__u32 action; /* enum pw_action */
	__u32 reason; /* enum pw_drop_reason */
	__u32 path;   /* enum pw_path */
	__u32 target_ifindex;
	__u32 instance; /* whose verdict was the last one */
	__u32 direction;
	__u32 source_identity;
	__u32 destination_identity;
	__u32 rule;
	__u32 sender_rule; /* what the sender's side said, where the target's spoke last */
	__u32 audited;
	__u32 node;	 /* flow->node: where it goes, or from where it came */
	__u32 tunnel_id; /* of the key that the packet leaves with */
};

/* Test builds only (map pw_tunnel_key): what from_overlay finds on a packet of a test run, which can carry no key. */
struct pw_tunnel_end {
	__u32 tunnel_id;
	__u8 outer[16]; /* who sent it, v4-mapped */
};

#endif
