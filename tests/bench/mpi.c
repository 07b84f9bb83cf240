/* The MPI side of mpi.py: calls and buffers as in examples/bench.rs, for whatever MPI compiles it.
 *
 * mpi DIRECTORY: reads lines such as `Allreduce 1024 100` from the pipe DIRECTORY/in<rank>, makes a hundred calls of
 * 1 KiB each, and answers in DIRECTORY/out<rank> with the seconds that they took on this rank; the first answer is the
 * process's id. Between turns a rank sleeps in read(), so that it does not disturb whose turn it is.
 *
 * With ONECCL defined, Allreduce is oneccl.cpp's: MPI starts the ranks and introduces them to each other.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef ONECCL
void oneccl_begin(int rank, int size);
void oneccl_all_reduce(float *sums, int floats);
#endif

enum { ROOT = 0, TAG = 0 };

static int rank, size;
static char *data, *all, *others;
static float *sums, *part, *parts;
static int floats, share;

static void *ones(size_t count, size_t width) {
    char *memory = malloc(count * width);
    if (memory == NULL) {
        fprintf(stderr, "out of memory\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    if (width == 1)
        memset(memory, 1, count);
    else
        for (size_t index = 0; index < count; index++) ((float *)memory)[index] = 1;
    return memory;
}

static void allocate(int bytes) {
    free(data), free(all), free(others), free(sums), free(part), free(parts);
    floats = bytes / (int)sizeof(float) > 0 ? bytes / (int)sizeof(float) : 1;
    share = floats / size > 0 ? floats / size : 1;
    data = ones((size_t)bytes + 1, 1);
    all = ones((size_t)bytes * size + 1, 1);
    others = ones((size_t)bytes * size + 1, 1);
    sums = ones(floats, sizeof(float));
    part = ones(share, sizeof(float));
    parts = ones((size_t)share * size, sizeof(float));
}

static void call(const char *operation, int bytes) {
    MPI_Comm world = MPI_COMM_WORLD;
    if (strcmp(operation, "PingPong") == 0) {
        if (rank == 0) {
            MPI_Send(data, bytes, MPI_BYTE, 1, TAG, world);
            MPI_Recv(data, bytes, MPI_BYTE, 1, TAG, world, MPI_STATUS_IGNORE);
        } else if (rank == 1) {
            MPI_Recv(data, bytes, MPI_BYTE, 0, TAG, world, MPI_STATUS_IGNORE);
            MPI_Send(data, bytes, MPI_BYTE, 0, TAG, world);
        }
    } else if (strcmp(operation, "Allreduce") == 0) {
#ifdef ONECCL
        oneccl_all_reduce(sums, floats);
#else
        MPI_Allreduce(MPI_IN_PLACE, sums, floats, MPI_FLOAT, MPI_SUM, world);
#endif
    } else if (strcmp(operation, "Reduce") == 0) {
        MPI_Reduce(rank == ROOT ? MPI_IN_PLACE : sums, rank == ROOT ? sums : NULL, floats, MPI_FLOAT, MPI_SUM, ROOT,
                   world);
    } else if (strcmp(operation, "Bcast") == 0) {
        MPI_Bcast(data, bytes, MPI_BYTE, ROOT, world);
    } else if (strcmp(operation, "Allgather") == 0) {
        MPI_Allgather(data, bytes, MPI_BYTE, all, bytes, MPI_BYTE, world);
    } else if (strcmp(operation, "Reduce_scatter") == 0) {
        MPI_Reduce_scatter_block(parts, part, share, MPI_FLOAT, MPI_SUM, world);
    } else if (strcmp(operation, "Alltoall") == 0) {
        MPI_Alltoall(others, bytes, MPI_BYTE, all, bytes, MPI_BYTE, world);
    } else if (strcmp(operation, "Gather") == 0) {
        MPI_Gather(data, bytes, MPI_BYTE, all, bytes, MPI_BYTE, ROOT, world);
    } else if (strcmp(operation, "Scatter") == 0) {
        MPI_Scatter(all, bytes, MPI_BYTE, data, bytes, MPI_BYTE, ROOT, world);
    } else if (strcmp(operation, "Barrier") == 0) {
        MPI_Barrier(world);
    } else {
        fprintf(stderr, "no operation %s\n", operation);
        MPI_Abort(world, 1);
    }
}

static FILE *pipe_of(const char *directory, const char *name, const char *mode) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s%d", directory, name, rank);
    FILE *file = fopen(path, mode);
    if (file == NULL) {
        perror(path);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return file;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc != 2) {
        fprintf(stderr, "usage: mpi DIRECTORY\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
#ifdef ONECCL
    oneccl_begin(rank, size);
#endif
    FILE *in = pipe_of(argv[1], "in", "r"), *out = pipe_of(argv[1], "out", "w");
    fprintf(out, "%d\n", (int)getpid());
    fflush(out);
    char operation[64];
    int bytes, calls, allocated = -1;
    while (fscanf(in, "%63s %d %d", operation, &bytes, &calls) == 3) {
        if (bytes != allocated) allocate(allocated = bytes);
        MPI_Barrier(MPI_COMM_WORLD);
        double began = MPI_Wtime();
        for (int index = 0; index < calls; index++) call(operation, bytes);
        fprintf(out, "%.9f\n", MPI_Wtime() - began);
        fflush(out);
    }
    MPI_Finalize();
    return 0;
}
