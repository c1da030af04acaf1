from tests.engine.test_columns import layout, shared, trained


def test_it(pool, lab_pool):
    path = [layout(2, 2), shared(2, (3, 12)), layout(1, 4), layout(4, 1)]
    for p in (pool, lab_pool):
        for t in ([layout(4, 1)] * 4, [layout(1, 1)] * 4, path, [layout(2, 2)] * 4, [layout(1, 4)] * 4):
            f = p.run(trained, path=t, name="routed", frozen=0)
            print(p is pool, f[0], flush=True)
