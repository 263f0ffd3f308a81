/* flow.c: one TCP connection between two network namespaces, both ends in this process, each thread on its own CPU.
 *
 * flow stream SERVER-NS CLIENT-NS ADDRESS MS SERVER-CPU CLIENT-CPU    prints bytes and nanoseconds, measured by the receiver
 * flow ask    SERVER-NS CLIENT-NS ADDRESS N  SERVER-CPU CLIENT-CPU    prints p50, p90 and p99 of N round trips of 64 bytes, in ns
 *
 * One more argument names the congestion control. A tenth of the time, or of the round trips, goes by before anything is counted. IPv4.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PORT	       5201
#define CHUNK_BYTES    (128 << 10)
#define QUESTION_BYTES 64
#define TIMEOUT_S      10

static long long amount;
static int answering;
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

/* A socket stays in the namespace that it was made in. */
static int socket_in(const char *namespace)
{
	struct timeval timeout = {.tv_sec = TIMEOUT_S};
	int one = 1, fd = open(namespace, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || setns(fd, CLONE_NEWNET))
		die(namespace);
	close(fd);
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

int main(int argc, char **argv)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(PORT)};
	struct end server;
	pthread_t thread;
	int listener, client;

	if (argc < 8 || argc > 9 || inet_pton(AF_INET, argv[4], &address.sin_addr) != 1)
		return 2;
	answering = !strcmp(argv[1], "ask");
	amount = atoll(argv[5]);
	congestion_control = argv[8];
	listener = socket_in(argv[2]);
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 1))
		die("listen");
	client = socket_in(argv[3]);
	if (connect(client, (struct sockaddr *)&address, sizeof(address)))
		die("connect");
	server.fd = accept(listener, NULL, NULL);
	server.cpu = atoi(argv[6]);
	if (server.fd < 0 || pthread_create(&thread, NULL, serve, &server))
		die("accept");
	use_cpu(atoi(argv[7]));
	if (answering)
		ask(client);
	else
		stream(client);
	pthread_join(thread, NULL);
	return 0;
}
