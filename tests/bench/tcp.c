/* A bare ping-pong over TCP, for tcp.py: two blocking sockets and nothing else.
 *
 * tcp RANK ADDRESS PORT DIRECTORY: rank 0 listens at the address, rank 1 connects to it. Both do what the pipes in the
 * directory say, as mpi.c does. The operations are PingPong and Uniband, which goes from rank 0 to rank 1 alone.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static void must(int works, const char *what) {
    if (works) return;
    perror(what);
    exit(1);
}

static int connected(int rank, const char *address, int port) {
    struct sockaddr_in where = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    must(inet_pton(AF_INET, address, &where.sin_addr) == 1, "the address");
    int one = 1, stream = socket(AF_INET, SOCK_STREAM, 0);
    must(stream >= 0, "socket");
    if (rank == 0) {
        int listener = stream;
        must(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0, "setsockopt");
        must(bind(listener, (struct sockaddr *)&where, sizeof where) == 0, "bind");
        must(listen(listener, 1) == 0, "listen");
        stream = accept(listener, NULL, NULL);
        must(stream >= 0, "accept");
    } else {
        /* Rank 0 may not listen yet. */
        for (int tries = 0; connect(stream, (struct sockaddr *)&where, sizeof where) != 0; tries++) {
            must(tries < 1000, "connect");
            usleep(10000);
        }
    }
    must(setsockopt(stream, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0, "setsockopt");
    return stream;
}

static void give(int stream, const char *data, size_t size) {
    for (ssize_t done; size > 0; data += done, size -= (size_t)done) {
        done = write(stream, data, size);
        must(done > 0, "write");
    }
}

static void take(int stream, char *data, size_t size) {
    for (ssize_t done; size > 0; data += done, size -= (size_t)done) {
        done = read(stream, data, size);
        must(done > 0, "read");
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

int main(int count, char **words) {
    if (count != 5) return 2;
    int rank = atoi(words[1]);
    char path[4096], operation[32];
    snprintf(path, sizeof path, "%s/in%d", words[4], rank);
    FILE *in = fopen(path, "r");
    must(in != NULL, path);
    snprintf(path, sizeof path, "%s/out%d", words[4], rank);
    FILE *out = fopen(path, "w");
    must(out != NULL, path);
    int stream = connected(rank, words[2], atoi(words[3]));
    fprintf(out, "%d\n", getpid());
    fflush(out);
    char *data = NULL;
    size_t size, held = 0;
    for (int calls; fscanf(in, "%31s %zu %d", operation, &size, &calls) == 3;) {
        if (size > held) {
            data = realloc(data, held = size);
            must(data != NULL, "memory");
            for (size_t index = 0; index < held; index++) data[index] = 1;
        }
        /* Both begin together. */
        char byte = 1;
        if (rank == 0) give(stream, &byte, 1);
        take(stream, &byte, 1);
        if (rank == 1) give(stream, &byte, 1);
        int both_ways = strcmp(operation, "PingPong") == 0;
        double began = now();
        for (int call = 0; call < calls; call++) {
            if (rank == 0) give(stream, data, size);
            if (rank == 1 || both_ways) take(stream, data, size);
            if (rank == 1 && both_ways) give(stream, data, size);
        }
        fprintf(out, "%.9f\n", now() - began);
        fflush(out);
    }
    return 0;
}
