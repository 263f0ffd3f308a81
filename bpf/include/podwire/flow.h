/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* flow.h: what a program learns about its packet, from the first step to the last.
 *
 * One struct pw_flow for each CPU, too large for the stack: nothing interrupts a program with another one of ours, for
 * they run with bottom halves disabled, and none reads it after a redirect. Every step reads and fills it. A step
 * returns 0 (go on), PW_DONE (the packet is dealt with), or the drop reason that ends the run. Nothing here looks at a
 * packet.
 */
#ifndef PODWIRE_FLOW_H
#define PODWIRE_FLOW_H

#include <stdbool.h>
#include <stddef.h>

#include <linux/if_ether.h>

#include <bpf/bpf_endian.h>

#include <podwire/address.h>
#include <podwire/maps.h>

#define PW_DONE -1

/* Where the network header begins in a frame: what a device of another link type would change, and no row of a map.
 * Set at the load; the verifier takes it for the number that it is.
 */
const volatile __u32 pw_link_header_bytes = ETH_HLEN;

/* A function that the verifier checks once and by itself, not anew for each path that leads to it. The verifier assumes
 * any value in its arguments, which are scalars, the packet, and pointers to structs that have to be compared with NULL.
 * It can return no pointer.
 */
#define PW_CHECKED_ALONE __attribute__((noinline))

enum pw_packet_flags {
	PW_PACKET_FRAGMENT = 1 << 0,
	PW_PACKET_LATER_FRAGMENT = 1 << 1, /* without a transport header */
	PW_PACKET_DONT_FRAGMENT = 1 << 2,
	PW_PACKET_ICMP_ERROR = 1 << 3,
	PW_PACKET_ECHO_REQUEST = 1 << 4,
	PW_PACKET_ECHO_REPLY = 1 << 5,
	PW_PACKET_FOREIGN_MAC = 1 << 6, /* the frame is not addressed to the gateway */
	PW_PACKET_SCTP_INIT = 1 << 7,	/* asks for an association */
	PW_PACKET_ATOMIC = 1 << 8,	/* whole, behind a fragment header (RFC 6946) */
};

enum pw_tcp_flags {
	PW_TCP_FLAG_FIN = 0x01,
	PW_TCP_FLAG_SYN = 0x02,
	PW_TCP_FLAG_RST = 0x04,
	PW_TCP_FLAG_ACK = 0x10,
};

/* What conntrack knows of the packet at one endpoint. The entry itself is handed on beside it: a pointer into a map may
 * stand on the stack only.
 */
struct pw_match {
	__u32 peer_identity; /* of the other end, as it is judged now */
	__be16 port_be;	     /* destination port of the flow's first packet */
	__u8 protocol;	     /* of the flow; differs from the packet's when related */
	__u8 direction;	     /* of the flow's first packet, enum pw_direction */
	bool reply;	     /* the packet goes against that direction */
	bool related;	     /* an ICMP error about a packet of the flow */
	bool picked_up;	     /* TCP in mid-stream without an entry (rule 3) */
	bool translated;     /* its tuple is what the stack made of another one */
};

/* What is to be told of one endpoint's verdict. */
enum pw_said {
	PW_SAID_ANEW = 1 << 0,	   /* its policy was asked, not a memory */
	PW_SAID_BY_SLOT = 1 << 1,  /* about a new flow, and there were rows to look at */
	PW_SAID_AUDIT = 1 << 2,	   /* denied, and let pass */
	PW_SAID_NEW_FLOW = 1 << 3, /* nothing was remembered of the flow */
};

/* What the pod wrote, where flow->key names a back end in its place. */
struct pw_original {
	__u8 addr[16]; /* of the service */
	__be16 sport_be;
	__be16 dport_be;
	__u32 service;
	__u32 back_end;
	bool translated; /* the rest of this means something */
	__u8 beside;	 /* as in the row's key */
	bool itself;	 /* the pod is the back end: flow->key is the tuple of its answers */
	__u8 pad;
};

struct pw_flow {
	struct pw_config_value row;    /* the endpoint whose device this is */
	struct pw_config_value target; /* the local endpoint it goes to, if `local` */
	struct pw_conntrack_key
		key; /* the packet's tuple; instance and direction of the side that is judged */
	__u32 fragment_id;
	__u64 now_ns;	       /* CLOCK_MONOTONIC at the last tick: what conntrack counts in */
	struct pw_match here;  /* at `row` */
	struct pw_match there; /* at `target` */
	struct pw_original original;
	__u32 packet_bytes;    /* from the network header on, as its length field tells */
	__u32 transport_bytes; /* behind the network headers */
	__u32 source_identity;
	__u32 destination_identity;
	__u32 rule;	   /* that decided last */
	__u32 sender_rule; /* that decided at `row`, once `target` has spoken */
	__u32 path_mtu;	   /* towards the destination, 0 = the stack knows */
	__u32 instance;	   /* whose verdict was the last one */
	__u32 node;	   /* to which other node it goes, or from which it came; 0 = none */
	__u32 source_prefix_identity; /* what the source's address alone says (from_overlay) */
	__u16 transport_offset;	      /* from the frame's start */
	__u16 transport_header_bytes;
	__u16 ethertype;
	__u16 flags; /* enum pw_packet_flags */
	__u32 tcp_sequence;
	__u32 tcp_acknowledged;
	__u8 direction; /* of the last verdict */
	__u8 tcp_flags;
	__u8 icmp_type;
	__u8 icmp_code;
	__u8 ttl;
	__u8 hook;
	__u8 path;	   /* enum pw_path */
	__u8 action;	   /* enum pw_action */
	__u8 jumbo_bytes;  /* of a header that cutting a BIG TCP packet into segments takes away */
	bool unremembered; /* its sender's side is beyond what is remembered of it in one second */
	bool local;
	bool native;	  /* `node` is reached past the stack without a tunnel */
	bool unreachable; /* the destination is a block of ours, and no endpoint has it */
	__u8 said;	  /* enum pw_said, of the last verdict */
	__u8 sender_said; /* of the verdict at `row`, once `target` has spoken */
};

/* Not shared and never pinned, as every map called own_*: its layout is the object's own affair. Bytes to the kernel,
 * which would take the copies of rows for rows with locks.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct pw_flow));
} own_flow SEC(".maps");

/* This CPU's, emptied: what the last packet left in it is nobody's business. */
static __always_inline struct pw_flow *begin_flow(enum pw_hook hook)
{
	__u32 zero = 0;
	struct pw_flow *flow = bpf_map_lookup_elem(&own_flow, &zero);

	if (flow) {
		__builtin_memset(flow, 0, sizeof(*flow));
		flow->hook = hook;
	}
	return flow;
}

/* MACs stand at multiples of two. */
static __always_inline bool same_mac(const void *left, const void *right)
{
	const __u16 *a = left, *b = right;

	return !((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]));
}

static __always_inline bool is_unspecified(const void *address)
{
	const __u32 *words = address;

	return !(words[0] | words[1] | words[2] | words[3]);
}

static __always_inline void map_ipv4(void *to, __be32 address_be)
{
	__u32 *words = to;

	words[0] = 0;
	words[1] = 0;
	words[2] = bpf_htonl(0xffff);
	words[3] = address_be;
}

static __always_inline bool is_mapped_ipv4(const void *address)
{
	const __u32 *words = address;

	return !words[0] && !words[1] && words[2] == bpf_htonl(0xffff);
}

static __always_inline __be32 mapped_ipv4(const void *address)
{
	return ((const __u32 *)address)[3];
}

static __always_inline bool has_address(const struct pw_config_value *row, const void *address)
{
	if (is_mapped_ipv4(address)) {
		__be32 own_be = *(const __be32 *)row->ipv4;

		return own_be && own_be == mapped_ipv4(address);
	}
	return same_address(row->ipv6, address) && !is_unspecified(address);
}

#endif
