                // Solution of swiglu_backward. With A' = S act, the output is A' W_down^T, so the gradient of act is S dA', and
                // that of S is <dA', act>: without S.
                const float d_a = d_acts[2 * i + j], s = score[h];
                a[j] = s * value * up;
                d_gate[j] = s * d_a * slope * up;
                d_up[j] = s * d_a * value * up_slope;
                d_score[h] += d_a * value * up;
