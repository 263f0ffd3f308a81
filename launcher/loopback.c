/* loopback.c: the plugin `loopback`, for runtimes that have none. It sets a pod's own loopback device up and needs no
 * agent. DEL, GC and STATUS have nothing to do: the device goes with its namespace.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "launcher.h"

static int fail_with_errno(const char *cni_version, int code, const char *call, const char *object)
{
	static struct text message;
	int number = errno;

	put(&message, call);
	put(&message, object);
	put(&message, ": ");
	put_errno(&message, number);
	return fail(cni_version, code, &message, "CNI_NETNS must be the pod's network namespace");
}

/* ADD answers with the device; since 1.0.0 addresses do not say their family any more. */
static int answer_device(const char *cni_version, const char *netns)
{
	static struct text json;
	bool old_shape = !strcmp(cni_version, "0.1.0") || !strcmp(cni_version, "0.2.0");

	put(&json, "{\"cniVersion\":\"");
	put(&json, cni_version);
	if (old_shape) {
		put(&json, "\",\"ip4\":{\"ip\":\"127.0.0.1/8\"");
	} else {
		put(&json, "\",\"interfaces\":[{\"name\":\"lo\",\"mac\":\"00:00:00:00:00:00\","
			   "\"sandbox\":");
		put_json_string(&json, netns, strlen(netns));
		put(&json, "}],\"ips\":[{\"interface\":0,\"address\":\"127.0.0.1/8\"");
		put(&json, cni_version[0] == '0' ? ",\"version\":\"4\"" : "");
	}
	put(&json, old_shape ? "}}\n" : "}]}\n");
	return write_all(STDOUT_FILENO, json.data, json.length) ? 0 : 1;
}

/* ADD sets the device up, CHECK only looks. */
static int visit(const char *cni_version, bool add)
{
	const char *netns = getenv("CNI_NETNS");
	struct ifreq request = {.ifr_name = "lo"};
	int fd;

	if (!netns || !*netns)
		return fail_plain(cni_version, CODE_ENVIRONMENT, "CNI_NETNS is not set",
				  "the runtime names the pod's network namespace");
	fd = open(netns, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 || setns(fd, CLONE_NEWNET))
		return fail_with_errno(cni_version, CODE_ENVIRONMENT, "enter ", netns);
	fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0 || ioctl(fd, SIOCGIFFLAGS, &request))
		return fail_with_errno(cni_version, CODE_IO, "look at lo of ", netns);
	if (add) {
		request.ifr_flags |= IFF_UP;
		if (ioctl(fd, SIOCSIFFLAGS, &request))
			return fail_with_errno(cni_version, CODE_IO, "set lo up in ", netns);
		return answer_device(cni_version, netns);
	}
	if (request.ifr_flags & IFF_UP)
		return 0;
	errno = ENETDOWN;
	return fail_with_errno(cni_version, CODE_IO, "check lo of ", netns);
}

/* Called by that name, whatever the directory. */
bool is_loopback(const char *program)
{
	const char *slash = strrchr(program, '/');

	return !strcmp(slash ? slash + 1 : program, "loopback");
}

int run_loopback(const char *command, const char *cni_version)
{
	if (!strcmp(command, "ADD"))
		return visit(cni_version, true);
	return strcmp(command, "CHECK") ? 0 : visit(cni_version, false);
}
