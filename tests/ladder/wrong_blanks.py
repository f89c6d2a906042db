"""Wrong solutions of the ladder's exercises, by what is wrong with them."""

REFILL = "        if (threadIdx.x == 0 && step > {} && step + STAGES - {} < steps) load(p, tile, step + STAGES - {});\n"
IN_FLIGHT = """            wgmma_wait_group<2>();
            mbarrier_arrive_if(leads && {}, empty_at(passed - {}));
        }}
        wgmma_wait_group<0>();
        pin_registers(acc);
{}        mbarrier_arrive_if(leads, empty_at(passed - 1));
"""
BEFORE_LAST = "        mbarrier_arrive_if(leads{}, empty_at(passed - 2));\n"
WIDTH = """                cp_async_16(to + i * PASS_ROWS * SWIZZLE_ROW, rows[i] + k,
                            row + i * PASS_ROWS < tile.row_end{});
"""

WRONG = {
    "tails": {
        "zeros": "        const uint4 of_a = make_uint4(0, 0, 0, 0), of_b = of_a;\n",
        "reads on": "        const uint4 of_a = load(a + k);\n        const uint4 of_b = load(b + k);\n",
        "reads b past its end": (
            "        const uint4 of_a = k + first < p.k ? load(a + k) : make_uint4(0, 0, 0, 0);\n"
            "        const uint4 of_b = load(b + k);\n"
        ),
        "of a whole step": (
            "        const bool inside = k + DEPTH <= p.k;\n"
            "        const uint4 of_a = inside ? load(a + k) : make_uint4(0, 0, 0, 0);\n"
            "        const uint4 of_b = inside ? load(b + k) : make_uint4(0, 0, 0, 0);\n"
        ),
    },
    "operands": {
        "unchanged": "mma_m16n8k16(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);\n",
        "halves swapped": "mma_m16n8k16(sums[i][j], a[i], b[j / 2][j % 2 + 2], b[j / 2][j % 2]);\n",
        "columns swapped": "mma_m16n8k16(sums[i][j], a[i], b[j / 2][1 - j % 2], b[j / 2][3 - j % 2]);\n",
    },
    "groups": {
        "the same wait": (
            "        cp_async_wait_group<STAGES - 2>();\n        __syncthreads();\n        if (ahead < steps) {\n"
            "            copy(to + ahead % STAGES * STAGE_BYTES, a + ahead * BK, b + ahead * BK, rows_apart);\n"
            "            cp_async_commit_group();\n        }\n"
        ),
        "no barrier": (
            "        cp_async_wait_group<0>();\n        if (ahead < steps) {\n"
            "            copy(to + ahead % STAGES * STAGE_BYTES, a + ahead * BK, b + ahead * BK, rows_apart);\n"
            "            cp_async_commit_group();\n        }\n"
        ),
        "one stage too few": (
            "        cp_async_wait_group<0>();\n        __syncthreads();\n        if (ahead + 1 < steps) {\n"
            "            copy(to + ahead % STAGES * STAGE_BYTES, a + ahead * BK, b + ahead * BK, rows_apart);\n"
            "            cp_async_commit_group();\n        }\n"
        ),
    },
    "refill": {
        "a stage twice": REFILL.format(0, 2, 2),
        "one stage never": REFILL.format(1, 1, 1),
        "not the last one": REFILL.format(1, 1, 2),
    },
    "in_flight": {
        "given back too early": IN_FLIGHT.format("k > 0", 1, ""),
        "one is kept": IN_FLIGHT.format("k > BK", 2, ""),
        "from the first step on": IN_FLIGHT.format("k > 0", 2, BEFORE_LAST.format(" && p.k > BK")),
    },
    "width": {
        "reads on": WIDTH.format(""),
        "no part of a step": WIDTH.format(" && k + BK <= p.d"),
        "chunks as numbers": WIDTH.format(" && k + chunk < p.d"),
    },
}
