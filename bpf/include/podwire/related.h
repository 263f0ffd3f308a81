/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* related.h: which flow an ICMP error is about. It quotes a packet that crossed the endpoint's edge the other way; that
 * packet's tuple is looked up, and the error passes if the flow may. Anybody can quote anything, so the error's own
 * addresses have to belong to the flow, too (rule 21); what does not is judged as the message that it is.
 */
#ifndef PODWIRE_RELATED_H
#define PODWIRE_RELATED_H

#include <podwire/conntrack.h>
#include <podwire/identity.h>
#include <podwire/parse.h>

/* The quoted packet. */
struct pw_quoted {
	struct pw_conntrack_key key __attribute__((aligned(8)));
	struct pw_chain chain;
};

static __always_inline bool quote_ipv4(struct __sk_buff *skb, struct pw_quoted *quoted)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, quoted->chain.offset, &ip, sizeof(ip)))
		return false;
	if (ip.version != 4 || ip.ihl < 5 || ip.frag_off & bpf_htons(PW_IPV4_OFFSET))
		return false;
	map_ipv4(quoted->key.saddr, ip.saddr);
	map_ipv4(quoted->key.daddr, ip.daddr);
	quoted->chain.protocol = ip.protocol;
	quoted->chain.offset += ip.ihl * 4;
	return true;
}

static __always_inline bool quote_ipv6(struct __sk_buff *skb, struct pw_quoted *quoted)
{
	__u32 offset = quoted->chain.offset;

	if (bpf_skb_load_bytes(skb, offset + offsetof(struct ipv6hdr, nexthdr),
			       &quoted->chain.protocol, 1) ||
	    bpf_skb_load_bytes(skb, offset + offsetof(struct ipv6hdr, saddr), quoted->key.saddr,
			       32))
		return false;
	quoted->chain.offset += sizeof(struct ipv6hdr);
	return !walk_ipv6_headers(skb, &quoted->chain) &&
	       !(quoted->chain.flags & PW_PACKET_LATER_FRAGMENT);
}

/* Every protocol with ports has them in its first four bytes. What a frame has behind its packet is no part of it. */
static __always_inline bool quote_transport(struct __sk_buff *skb, const struct pw_flow *flow,
					    struct pw_quoted *quoted)
{
	__u32 end = flow->transport_offset + flow->transport_bytes;
	struct pw_icmp_header start;

	if (quoted->chain.offset + sizeof(start) > end ||
	    bpf_skb_load_bytes(skb, quoted->chain.offset, &start, sizeof(start)))
		return false;
	quoted->key.protocol = quoted->chain.protocol;
	switch (quoted->key.protocol) {
	case IPPROTO_TCP:
	case IPPROTO_UDP:
	case IPPROTO_UDPLITE:
	case IPPROTO_SCTP:
		__builtin_memcpy(&quoted->key.sport_be, &start, 4);
		return true;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		set_icmp_ports(&quoted->key, &start);
		return icmp_flags(quoted->key.protocol, start.type) &
		       (PW_PACKET_ECHO_REQUEST | PW_PACKET_ECHO_REPLY);
	default:
		return true;
	}
}

/* A pod speaks of what it was sent itself. A router, a node or the gateway may tell of a packet for somebody else. What
 * comes by the tunnel says whether a pod is behind a node's address.
 */
static __always_inline bool is_from_pod(struct __sk_buff *skb, const struct pw_flow *flow)
{
	__u32 ifindex = skb->ingress_ifindex;

	if (flow->hook == PW_HOOK_FROM_POD || bpf_map_lookup_elem(&pw_config, &ifindex))
		return true;
	if (flow->hook == PW_HOOK_FROM_OVERLAY && may_change(flow->source_identity))
		return true;
	return is_pod_address(flow->key.saddr);
}

/* Has somebody who is neither end of the flow ever seen its packets? This host sees all of them. What stays on the node,
 * to a pod or to the host itself, nobody else does; what goes through the tunnel, only who sends through it.
 */
static __always_inline bool stands_between(struct __sk_buff *skb, const struct pw_flow *flow,
					   const struct pw_conntrack_value *entry)
{
	if (is_from_this_host(skb, flow))
		return true;
	if (entry->path == PW_PATH_LOCAL || entry->peer_identity == PW_IDENTITY_HOST)
		return false;
	return entry->path != PW_PATH_TUNNEL || flow->hook == PW_HOOK_FROM_OVERLAY;
}

/* Reads the quoted packet's tuple; 0 = there is none. */
PW_CHECKED_ALONE int read_quote(struct __sk_buff *skb, const struct pw_flow *flow,
				struct pw_quoted *quoted)
{
	bool read;

	if (!flow || !quoted)
		return 0;
	read = flow->ethertype == ETH_P_IP ? quote_ipv4(skb, quoted) : quote_ipv6(skb, quoted);
	return read && quote_transport(skb, flow, quoted);
}

/* Finds the flow at the endpoint whose instance and direction are in flow->key. An error goes to the sender of the
 * packet that it quotes. It comes from that packet's destination, or from a router on the way.
 */
static __noinline struct pw_conntrack_value *
find_related(struct __sk_buff *skb, struct pw_flow *flow, struct pw_match *match)
{
	struct pw_conntrack_value *entry;
	struct pw_quoted quoted = {
		.key.instance = flow->key.instance,
		.key.direction = !flow->key.direction,
		.chain.offset = flow->transport_offset + sizeof(struct pw_icmp_header),
	};
	bool reply, from_peer;

	if (!read_quote(skb, flow, &quoted) || !same_address(quoted.key.saddr, flow->key.daddr))
		return NULL;
	from_peer = same_address(quoted.key.daddr, flow->key.saddr);
	if (!from_peer && is_from_pod(skb, flow))
		return NULL;
	entry = find_either(&quoted.key, flow->now_ns, &reply);
	if (!entry || !(from_peer || stands_between(skb, flow, entry)))
		return NULL;
	describe_match(match, &quoted.key, reply);
	match->related = true;
	match->reply = !reply;
	return entry;
}

/* What a pod has to a service is another tuple than what the network sees: nothing but the pod's own packet has it. What
 * it has with itself nobody else sees at all.
 */
static __always_inline bool is_hidden(const struct pw_match *match,
				      const struct pw_conntrack_value *entry)
{
	if (!entry)
		return false;
	if (entry->kind == PW_CONNTRACK_SERVICE)
		return match->reply || match->related;
	return entry->kind == PW_CONNTRACK_OF_ITSELF && match->reply;
}

/* The entry of the packet's flow, and in `match` what else is known of it. */
static __noinline struct pw_conntrack_value *
look_up_flow(struct __sk_buff *skb, struct pw_flow *flow, struct pw_match *match)
{
	struct pw_conntrack_value *entry = find_flow(flow, match);

	if (flow->flags & PW_PACKET_ICMP_ERROR && !(flow->flags & PW_PACKET_LATER_FRAGMENT))
		entry = find_related(skb, flow, match);
	if (is_hidden(match, entry)) {
		describe_match(match, &flow->key, false);
		return NULL;
	}
	return entry;
}

#endif
