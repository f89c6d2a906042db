        if (threadIdx.x == 0 && step > 1 && step + STAGES - 2 < steps) load(p, tile, step + STAGES - 2);
