// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* redirect: the least that a program can do to bring a packet from one pod to another of the same node. At tc ingress of a
 * pod's host device; writes the target's MACs and hands the packet over. What from_pod costs is measured against it.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

const volatile __u32 target_index;
const volatile __u64 destination_mac; /* in its lower 48 bits, first byte lowest */
const volatile __u64 source_mac;

SEC("tc")
int redirect(struct __sk_buff *skb)
{
	__u8 macs[12];

	for (int i = 0; i < 6; i++) {
		macs[i] = destination_mac >> (8 * i);
		macs[6 + i] = source_mac >> (8 * i);
	}
	if (bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0))
		return 2; /* TC_ACT_SHOT */
	return bpf_redirect_peer(target_index, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
