"""Traffic of one model over nodes of several dtypes: measured, and logged once."""

from din_extproc.observe.mixture import DtypeMixture


def counted(mixture: DtypeMixture, **requests: int) -> None:
    for dtype, count in requests.items():
        for _ in range(count):
            mixture.count("m", dtype)


def test_one_dtype_is_no_mixture():
    mixture = DtypeMixture()
    counted(mixture, bf16=100)
    assert list(mixture.look(1.0)) == []
    assert mixture.shares() == {}
    assert mixture.share("unknown") == 0.0


def test_a_mixture_is_measured_and_alarmed_once():
    mixture = DtypeMixture()
    mixture.look(0.0)
    counted(mixture, bf16=75, fp8=25)
    assert mixture.shares() == {"m": 0.25}
    (alarm,) = mixture.look(0.0)
    assert (alarm.model, alarm.mixed, alarm.share, alarm.dtypes) == ("m", True, 0.25, ("bf16", "fp8"))
    assert list(mixture.look(1.0)) == []


def test_the_alarm_is_lifted_when_the_rest_is_long_ago():
    mixture = DtypeMixture()
    counted(mixture, bf16=75, fp8=25)
    assert [alarm.mixed for alarm in mixture.look(0.0)] == [True]
    for minute in range(1, 20):
        counted(mixture, bf16=100)
        alarms = list(mixture.look(60.0 * minute))
        if alarms:
            break
    assert [alarm.mixed for alarm in alarms] == [False]
    assert mixture.shares() == {}
