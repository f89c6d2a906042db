            wgmma_wait_group<2>();
            mbarrier_arrive_if(leads && k > BK, empty_at(passed - 2));
        }
        wgmma_wait_group<0>();
        pin_registers(acc);
        mbarrier_arrive_if(leads && p.k > BK, empty_at(passed - 2));
        mbarrier_arrive_if(leads, empty_at(passed - 1));
