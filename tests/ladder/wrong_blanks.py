"""Wrong solutions of the ladder's exercises, by what is wrong with them."""

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
}
