                cp_async_16(to + i * PASS_ROWS * SWIZZLE_ROW, rows[i] + k,
                            row + i * PASS_ROWS < tile.row_end && k + chunk * CHUNK < p.d);
