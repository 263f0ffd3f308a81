/* exec.c: `podwire-cni exec` enters namespaces and becomes a command, for an agent that never forks. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher.h"

#define EXIT_HELPER 125
#define EXIT_CANNOT_EXECUTE 126
#define EXIT_NOT_FOUND 127

static int complain(int status, const char *call, const char *object, int number)
{
	static struct text text;

	put(&text, "podwire-cni exec: ");
	put(&text, call);
	put(&text, object);
	if (number) {
		put(&text, ": ");
		put_errno(&text, number);
	}
	put(&text, "\n");
	write_all(STDERR_FILENO, text.data, text.length);
	return status;
}

/* A namespace's descriptor: given by number, or opened by path. */
static int open_namespace(const char *where)
{
	char *end;
	long number = strtol(where, &end, 10);

	if (*where >= '0' && *where <= '9' && !*end && number <= 0x7fffffff)
		return (int)number;
	return open(where, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
}

struct namespaces {
	const char *netns;
	const char *mntns;
};

/* Both are opened before either is entered: paths and descriptors are the caller's. */
static int enter(const struct namespaces *wanted)
{
	int netns = wanted->netns ? open_namespace(wanted->netns) : -1;
	int mntns;

	if (wanted->netns && netns < 0)
		return complain(EXIT_HELPER, "open network namespace ", wanted->netns, errno);
	mntns = wanted->mntns ? open_namespace(wanted->mntns) : -1;
	if (wanted->mntns && mntns < 0)
		return complain(EXIT_HELPER, "open mount namespace ", wanted->mntns, errno);
	if (netns >= 0 && setns(netns, CLONE_NEWNET))
		return complain(EXIT_HELPER, "enter network namespace ", wanted->netns, errno);
	if (mntns >= 0 && setns(mntns, CLONE_NEWNS))
		return complain(EXIT_HELPER, "enter mount namespace ", wanted->mntns, errno);
	if (netns >= 0)
		close(netns);
	if (mntns >= 0)
		close(mntns);
	return 0;
}

/* The options of `argv` from 2 on; the index of the command, 0 when they are wrong. */
static int read_options(int argc, char **argv, struct namespaces *wanted)
{
	int at = 2;

	while (at < argc && !strncmp(argv[at], "--", 2)) {
		if (!strcmp(argv[at], "--")) {
			at++;
			break;
		}
		if (at + 1 < argc && !strcmp(argv[at], "--netns"))
			wanted->netns = argv[at + 1];
		else if (at + 1 < argc && !strcmp(argv[at], "--mntns"))
			wanted->mntns = argv[at + 1];
		else
			return 0;
		at += 2;
	}
	return at < argc ? at : 0;
}

int run_helper(int argc, char **argv)
{
	struct namespaces wanted = {0};
	int command = read_options(argc, argv, &wanted);
	int status;

	if (!command)
		return complain(EXIT_HELPER,
				"usage: podwire-cni exec [--netns FD|PATH] [--mntns FD|PATH] [--] ",
				"COMMAND [ARGUMENT...]", 0);
	status = enter(&wanted);
	if (status)
		return status;
	execvp(argv[command], argv + command);
	status = errno == ENOENT ? EXIT_NOT_FOUND : EXIT_CANNOT_EXECUTE;
	return complain(status, "execute ", argv[command], errno);
}
