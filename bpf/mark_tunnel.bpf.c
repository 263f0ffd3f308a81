// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* mark_tunnel: gives what enters the tunnel the node's mark (rule 22), at tc egress of the tunnel device, in front of
 * to_overlay.
 *
 * Comes to: out, for what has its key already; else on to to_overlay. A program of its own behind a handle of its own:
 * when an older build, whose programs do not mark, puts these in the place of ours, this one stays where it is, and
 * nothing that it tunnels is taken for a process's forgery until the older agent has written its table. It needs no
 * agent.
 */
#include <linux/bpf.h>

#include <linux/pkt_cls.h>

#include <podwire/tunnel.h>

/* A mark of our own tells to_overlay whose piece it is, which then marks the packet itself. */
static __always_inline bool tells_of_pod(const struct __sk_buff *skb)
{
	return (skb->mark & ~PW_MARK_FOREIGN_BITS) == PW_MARK_POD_PIECE;
}

SEC("tc")
int mark_tunnel(struct __sk_buff *skb)
{
	if (skb->ifindex != tunnel_device() || has_tunnel_key(skb)) {
		mark_as_tunnelled(skb);
		return TC_ACT_OK;
	}
	if (!tells_of_pod(skb))
		mark_as_tunnelled(skb);
	return TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "Dual BSD/GPL";
