/* flow.c: TCP between two network namespaces, both ends in this process, each thread on its own CPU.
 *
 * flow stream SERVER-NS CLIENT-NS ADDRESS MS SERVER-CPU CLIENT-CPU    prints bytes and nanoseconds, measured by the receiver
 * flow ask    SERVER-NS CLIENT-NS ADDRESS N  SERVER-CPU CLIENT-CPU    prints p50, p90 and p99 of N round trips of 64 bytes, in ns
 * flow open   SERVER-NS CLIENT-NS ADDRESS MS SERVER-CPU CLIENT-CPU    prints connections and nanoseconds: one after the other,
 *                                                                    each for one question and one answer
 *
 * ADDRESS is the server's, or SERVICE:PORT, whose back ends are the server's ports 5201 to 5210.
 * One more argument names the congestion control. A tenth of the time, or of the round trips, goes by before anything is counted. IPv4.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PORT	       5201
#define SERVICE_PORTS  10
#define CHUNK_BYTES    (128 << 10)
#define QUESTION_BYTES 64
#define TIMEOUT_S      10

static long long amount;
static int answering;
static struct pollfd listeners[SERVICE_PORTS];
static int listener_count;
static volatile int ended;
static const char *congestion_control; /* NULL: what the machine's sockets have */

static long long now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void use_cpu(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		die("pin to a CPU");
}

static void enter(const char *namespace)
{
	int fd = open(namespace, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || setns(fd, CLONE_NEWNET))
		die(namespace);
	close(fd);
}

/* A socket stays in the namespace that it was made in. */
static int make_socket(void)
{
	struct timeval timeout = {.tv_sec = TIMEOUT_S};
	int one = 1, fd;

	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		die("make a socket");
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	if (congestion_control && setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion_control,
					     strlen(congestion_control)))
		die(congestion_control);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
	return fd;
}

static void move_all(int fd, char *data, size_t size, int sending)
{
	for (size_t done = 0; done < size;) {
		ssize_t n = sending ? send(fd, data + done, size - done, MSG_NOSIGNAL)
				    : recv(fd, data + done, size - done, 0);
		if (n <= 0)
			die(sending ? "send" : "receive");
		done += n;
	}
}

struct end {
	int fd;
	int cpu;
};

static void *serve(void *argument)
{
	struct end *end = argument;
	char *data = calloc(1, CHUNK_BYTES);

	use_cpu(end->cpu);
	if (answering) {
		for (long long i = 0; i < amount; i++) {
			move_all(end->fd, data, QUESTION_BYTES, 0);
			move_all(end->fd, data, QUESTION_BYTES, 1);
		}
	} else {
		long long begin = now_ns(), from = begin + amount * 100000, counted = 0, bytes = 0;
		long long until = begin + amount * 1000000;
		ssize_t n;

		while ((n = recv(end->fd, data, CHUNK_BYTES, 0)) > 0) {
			long long now = now_ns();

			if (!counted && now >= from)
				counted = now;
			else if (counted)
				bytes += n;
			if (now >= until) {
				printf("%lld %lld\n", bytes, now - counted);
				break;
			}
		}
		shutdown(end->fd, SHUT_RDWR);
	}
	free(data);
	return NULL;
}

static int compare(const void *one, const void *two)
{
	long long a = *(const long long *)one, b = *(const long long *)two;

	return (a > b) - (a < b);
}

static void ask(int fd)
{
	long long *round = calloc(amount, sizeof(*round)), skipped = amount / 10,
		  kept = amount - skipped;
	char data[QUESTION_BYTES] = {0};

	for (long long i = 0; i < amount; i++) {
		long long begin = now_ns();

		move_all(fd, data, sizeof(data), 1);
		move_all(fd, data, sizeof(data), 0);
		round[i] = now_ns() - begin;
	}
	qsort(round + skipped, kept, sizeof(*round), compare);
	printf("%lld %lld %lld\n", round[skipped + kept / 2], round[skipped + kept * 9 / 10],
	       round[skipped + kept * 99 / 100]);
	free(round);
}

static void stream(int fd)
{
	char *data = calloc(1, CHUNK_BYTES);

	while (send(fd, data, CHUNK_BYTES, MSG_NOSIGNAL) > 0)
		;
	free(data);
}

static void listen_in(const char *namespace, struct sockaddr_in address)
{
	int fd;

	enter(namespace);
	fd = make_socket();
	if (bind(fd, (struct sockaddr *)&address, sizeof(address)) || listen(fd, SOMAXCONN))
		die("listen");
	listeners[listener_count++] = (struct pollfd){.fd = fd, .events = POLLIN};
}

/* Gives -1 when nobody has come within a while. */
static int accept_one(int wait_ms)
{
	if (poll(listeners, listener_count, wait_ms) > 0)
		for (int i = 0; i < listener_count; i++)
			if (listeners[i].revents & POLLIN)
				return accept(listeners[i].fd, NULL, NULL);
	return -1;
}

static void *serve_each(void *argument)
{
	char data[QUESTION_BYTES];

	use_cpu(((struct end *)argument)->cpu);
	while (!ended) {
		int fd = accept_one(100);

		if (fd < 0)
			continue;
		move_all(fd, data, sizeof(data), 0);
		move_all(fd, data, sizeof(data), 1);
		/* Who closes first keeps the port for a minute; the client needs a new one each time. */
		close(fd);
	}
	return NULL;
}

static void open_each(const char *namespace, const struct sockaddr_in *address)
{
	long long begin = now_ns(), from = begin + amount * 100000, counted = 0, opened = 0;
	char data[QUESTION_BYTES] = {0};

	enter(namespace);
	for (;;) {
		int fd = make_socket();
		long long now;

		if (connect(fd, (const struct sockaddr *)address, sizeof(*address)))
			die("connect");
		move_all(fd, data, sizeof(data), 1);
		move_all(fd, data, sizeof(data), 0);
		if (recv(fd, data, 1, 0))
			die("wait for the end");
		close(fd);
		now = now_ns();
		if (counted)
			opened++;
		else if (now >= from)
			counted = now;
		if (now >= begin + amount * 1000000) {
			printf("%lld %lld\n", opened, now - counted);
			ended = 1;
			return;
		}
	}
}

static void run_one(const char *namespace, const struct sockaddr_in *address, struct end *server,
		    int cpu)
{
	pthread_t thread;
	int client;

	enter(namespace);
	client = make_socket();
	if (connect(client, (const struct sockaddr *)address, sizeof(*address)))
		die("connect");
	server->fd = accept_one(TIMEOUT_S * 1000);
	if (server->fd < 0 || pthread_create(&thread, NULL, serve, server))
		die("accept");
	use_cpu(cpu);
	if (answering)
		ask(client);
	else
		stream(client);
	pthread_join(thread, NULL);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(PORT)},
			   any = address;
	struct end server;
	pthread_t thread;
	char *port = argc > 4 ? strchr(argv[4], ':') : NULL;

	if (port) {
		*port++ = 0;
		address.sin_port = htons(atoi(port));
	}
	if (argc < 8 || argc > 9 || inet_pton(AF_INET, argv[4], &address.sin_addr) != 1)
		return 2;
	answering = !strcmp(argv[1], "ask");
	amount = atoll(argv[5]);
	congestion_control = argv[8];
	if (!port)
		listen_in(argv[2], address);
	for (int i = 0; port && i < SERVICE_PORTS; i++) {
		any.sin_port = htons(PORT + i);
		listen_in(argv[2], any);
	}
	server.cpu = atoi(argv[6]);
	if (strcmp(argv[1], "open")) {
		run_one(argv[3], &address, &server, atoi(argv[7]));
		return 0;
	}
	if (pthread_create(&thread, NULL, serve_each, &server))
		die("serve");
	use_cpu(atoi(argv[7]));
	open_each(argv[3], &address);
	pthread_join(thread, NULL);
	return 0;
}
