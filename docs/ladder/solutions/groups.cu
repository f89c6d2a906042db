        if (step + STAGES - 2 < steps) cp_async_wait_group<STAGES - 2>();
        else cp_async_wait_group<0>();
        __syncthreads();
        if (ahead < steps) {
            copy(to + ahead % STAGES * STAGE_BYTES, a + ahead * BK, b + ahead * BK, rows_apart);
            cp_async_commit_group();
        }
