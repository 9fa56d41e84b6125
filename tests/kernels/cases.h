/* What kernel_check.c runs. Neighbouring cases differ in dtype, so that each Nth case still holds all of them when N
 * is no multiple of 5. */

enum { NUM_KV_DTYPES = 5, NUM_WIRE_DTYPES = 3 };

#define COUNT(list) ((int)(sizeof(list) / sizeof *(list)))

/* Every head_dim and group, lengths around a block, one to seven rows. */
static void check_shapes(check_run *run) {
    static const int dims[] = {8, 16, 24, 40, 64, 72, 80, 96, 112, 128, 160, 192, 200, 256};
    static const int lengths[] = {1, 2, 3, 17, 63, 64, 65, 100, 127, 128, 129, 193, 257};
    static const int rows[] = {1, 1, 1, 2, 3, 7};
    int turn = 0;
    for (int d = 0; d < COUNT(dims); d++)
        for (int group = 1; group <= 16; group++)
            for (int dtype = 0; dtype < NUM_KV_DTYPES; dtype++, turn++) {
                const int length = lengths[turn % COUNT(lengths)], kv_heads = group < 8 ? 2 : 1;
                check(run, (check_case){.kv_dtype = dtype, .wire_dtype = turn / 7 % NUM_WIRE_DTYPES,
                                        .heads = group * kv_heads, .kv_heads = kv_heads, .dim = dims[d],
                                        .rows = (int)fd_min(length, rows[turn % COUNT(rows)]), .length = length});
            }
    for (int dtype = 0; dtype < NUM_KV_DTYPES; dtype++) {
        check(run, (check_case){.kv_dtype = dtype, .heads = 71, .kv_heads = 1, .dim = 64, .rows = 1, .length = 90});
        check(run, (check_case){.kv_dtype = dtype, .heads = 3, .kv_heads = 1, .dim = 1024, .rows = 2, .length = 70});
    }
}

/* Lengths around one, two and three segments. */
static void check_segments(check_run *run) {
    static const int around[] = {-65, -64, -1, 0, 1, 63, 64, 65};
    static const int shapes[][3] = {{1, 1, 128}, {4, 1, 64}, {7, 1, 40}, {6, 2, 8}, {8, 1, 128}, {3, 1, 256}};
    int turn = 0;
    for (int segments = 1; segments <= 3; segments++)
        for (int i = 0; i < COUNT(around); i++, turn++)
            for (int dtype = 0; dtype < NUM_KV_DTYPES; dtype++) {
                const int *shape = shapes[(turn + dtype) % COUNT(shapes)];
                check(run, (check_case){.kv_dtype = dtype, .heads = shape[0], .kv_heads = shape[1], .dim = shape[2],
                                        .rows = 1 + turn % 3, .length = segments * FD_SEG + around[i]});
            }
}

/* Windows, caps, sinks and slopes together and apart. */
static void check_windows(check_run *run) {
    static const int windows[] = {0, 1, 2, 63, 64, 65, 100, 1000, 1100};
    static const float caps[] = {0.0f, 0.5f, 30.0f};
    int turn = 0;
    for (int w = 0; w < COUNT(windows); w++)
        for (int cap = 0; cap < COUNT(caps); cap++)
            for (int extras = 0; extras < 2; extras++)
                for (int dtype = 0; dtype < NUM_KV_DTYPES; dtype++, turn++) {
                    const int window = windows[w], more[] = {-1, 0, 1, window, window + 70};
                    const int length = (int)fd_max(1, window + more[turn / 5 % COUNT(more)]);
                    check(run, (check_case){.kv_dtype = dtype, .heads = 4, .kv_heads = 1 + turn % 2, .dim = 24,
                                            .rows = (int)fd_min(length, 1 + turn % 4), .length = window ? length : 130,
                                            .window = window, .softcap = caps[cap], .extras = extras});
                }
}

/* Many rows of one sequence: units that hold all of them, and units that walk their segments themselves. */
static void check_rows(check_run *run) {
    static const int rows[] = {4, 17, 43, 60, 129, 200};
    static const int lengths[] = {0, 5, 900, 1000};
    int turn = 0;
    for (int r = 0; r < COUNT(rows); r++)
        for (int l = 0; l < COUNT(lengths); l++)
            for (int dtype = 0; dtype < NUM_KV_DTYPES; dtype++, turn++)
                check(run, (check_case){.kv_dtype = dtype, .wire_dtype = turn % NUM_WIRE_DTYPES, .heads = 3,
                                        .kv_heads = 1, .dim = 8 + 32 * (turn % 2), .rows = rows[r],
                                        .length = lengths[l] + rows[r], .window = turn % 3 == 2 && rows[r] < 150 ? 300 : 0,
                                        .softcap = turn % 4 == 3 ? 20.0f : 0.0f, .extras = turn % 7 == 0});
}
