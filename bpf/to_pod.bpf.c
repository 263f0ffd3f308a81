// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* to_pod: everything the host's stack, or another pod's program, hands to a pod, at tc egress of the pod's host device.
 *
 * Comes to: drop, or on to the pod. What a program of ours has judged already carries its mark and is let through; the
 * mark counts only on packets that came in through a device where a program of ours has been before (rule 7).
 */
#include <linux/bpf.h>

#include <podwire/deliver.h>
#include <podwire/frame.h>

static __always_inline int pass_judged(struct __sk_buff *skb, struct pw_flow *flow)
{
	__u32 ifindex = skb->ingress_ifindex;

	if (skb->mark != PW_MARK_JUDGED)
		return 0;
	if (!bpf_map_lookup_elem(&pw_config, &ifindex) &&
	    (!ifindex || (ifindex != tunnel_device() && ifindex != native_device())))
		return 0;
	skb->mark = 0;
	flow->path = PW_PATH_LOCAL;
	flow->action = PW_ACTION_STACK;
	return PW_DONE;
}

/* What an endpoint of this node sends came in through its own device, whatever the stack did with it since (rule 24).
 * Without a device it was made here: a process that may choose its source may do anything, and so may the stack, which
 * puts a pod's address on what it answers in that pod's place.
 */
static __always_inline int check_sender_device(struct __sk_buff *skb, const struct pw_flow *flow)
{
	const struct pw_endpoint_value *owner;
	__u32 ifindex = skb->ingress_ifindex;

	if (!ifindex)
		return 0;
	owner = bpf_map_lookup_elem(&pw_endpoints, flow->key.saddr);
	return owner && owner->ifindex != ifindex ? PW_DROP_SOURCE_ADDRESS : 0;
}

/* The receiver's side. An answer's other end is who the entry says, as the stack may have translated it, as long as its
 * address tells nothing newer; an ICMP error's is that of its flow.
 */
static __always_inline int judge_receiver(struct __sk_buff *skb, struct pw_flow *flow)
{
	struct pw_conntrack_value *entry;

	flow->path = PW_PATH_STACK;
	flow->destination_identity = flow->row.identity;
	flow->now_ns = bpf_ktime_get_coarse_ns();
	entry = look_up_flow(skb, flow, &flow->here);
	if (entry && flow->here.related)
		flow->source_identity = entry->peer_identity;
	else if (entry && flow->here.reply)
		flow->source_identity = present_identity(flow->key.saddr, entry);
	else
		flow->source_identity = stack_identity(skb, flow, entry, &flow->target);
	flow->here.peer_identity = flow->source_identity;
	return judge(skb, flow, &flow->row, &flow->here, entry)
		       ?: remember(flow, &flow->row, &flow->here, entry)
		       ?: come_home(skb, flow, &flow->here, entry);
}

SEC("tc")
int to_pod(struct __sk_buff *skb)
{
	struct pw_flow *flow = begin_flow(PW_HOOK_TO_POD);
	int outcome;

	if (!flow)
		return TC_ACT_SHOT;
	outcome = copy_row(skb->ifindex, &flow->row) ?:
		  open_frame(skb, flow, PW_INGRESS) ?:
		  pass_judged(skb, flow) ?:
		  check_frame_to_pod(flow) ?:
		  parse_packet(skb, flow) ?:
		  check_packet_to_pod(flow) ?:
		  check_sender_device(skb, flow) ?:
		  keep_fragment(flow) ?:
		  judge_receiver(skb, flow);
	if (!outcome)
		flow->action = PW_ACTION_STACK;
	return finish(skb, flow, outcome);
}

char _license[] SEC("license") = "Dual BSD/GPL";
