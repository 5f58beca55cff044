// What istiod would send a proxy: `istio_translate gateway|sidecar NAMESPACE LABEL=VALUE RESOURCES OUT` writes the proxy's listeners,
// routes and clusters as JSON. Istio logs to standard output.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"istio.io/istio/pilot/pkg/model"
	"istio.io/istio/pilot/pkg/networking/core"
	"istio.io/istio/pkg/test"
)

func proxyOf(mode, namespace, label string) *model.Proxy {
	name, value, _ := strings.Cut(label, "=")
	labels := map[string]string{name: value}
	kind := map[string]model.NodeType{"gateway": model.Router, "sidecar": model.SidecarProxy}[mode]
	return &model.Proxy{
		Type: kind, ConfigNamespace: namespace, IPAddresses: []string{"127.0.0.1"}, ID: "proxy." + namespace, Labels: labels,
		Metadata: &model.NodeMetadata{Namespace: namespace, Labels: labels},
	}
}

func asJSON[M proto.Message](t test.Failer, messages []M) (written []json.RawMessage) {
	for _, each := range messages {
		text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(each)
		if err != nil {
			t.Fatal(err)
		}
		written = append(written, text)
	}
	return written
}

func main() {
	mode, namespace, label, in, out := os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5]
	resources, err := os.ReadFile(in)
	if err == nil {
		err = test.Wrap(func(t test.Failer) {
			translator := core.NewConfigGenTest(t, core.TestOptions{ConfigString: string(resources)})
			proxy := translator.SetupProxy(proxyOf(mode, namespace, label))
			text, failed := json.Marshal(map[string][]json.RawMessage{
				"listeners": asJSON(t, translator.Listeners(proxy)),
				"routes":    asJSON(t, translator.Routes(proxy)),
				"clusters":  asJSON(t, translator.Clusters(proxy)),
			})
			if failed == nil {
				failed = os.WriteFile(out, text, 0o600)
			}
			if failed != nil {
				t.Fatal(failed)
			}
		})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
