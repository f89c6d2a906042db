                mma_m16n8k16(sums[i][j], a[i], b[j / 2][j % 2], b[j / 2][j % 2 + 2]);
