// An empty ext_proc server on grpc-go: what a compiled sidecar costs before it does anything.
package main

import (
	"fmt"
	"io"
	"log"
	"net"
	"os"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
)

type noop struct {
	extprocv3.UnimplementedExternalProcessorServer
}

func setHeaders(names ...string) *extprocv3.CommonResponse {
	mutation := &extprocv3.HeaderMutation{}
	for _, name := range names {
		mutation.SetHeaders = append(mutation.SetHeaders, &corev3.HeaderValueOption{
			Header:       &corev3.HeaderValue{Key: name, RawValue: []byte("backend")},
			AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
		})
	}
	return &extprocv3.CommonResponse{HeaderMutation: mutation, ClearRouteCache: true}
}

var (
	onHeaders = &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{
		RequestHeaders: &extprocv3.HeadersResponse{}}}
	onBody = &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{
		RequestBody: &extprocv3.BodyResponse{Response: setHeaders("x-din-cluster", "x-din-endpoint", "x-din-trace-id", "x-din-model")}}}
	onAnswer = &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseHeaders{
		ResponseHeaders: &extprocv3.HeadersResponse{}}}
)

func (noop) Process(stream extprocv3.ExternalProcessor_ProcessServer) error {
	for {
		request, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		var reply *extprocv3.ProcessingResponse
		switch request.Request.(type) {
		case *extprocv3.ProcessingRequest_RequestHeaders:
			reply = onHeaders
		case *extprocv3.ProcessingRequest_RequestBody:
			reply = onBody
		case *extprocv3.ProcessingRequest_ResponseHeaders:
			reply = onAnswer
		default:
			continue
		}
		if err := stream.Send(reply); err != nil {
			return err
		}
	}
}

func main() {
	listener, err := net.Listen("unix", os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer(grpc.MaxRecvMsgSize(64<<20), grpc.MaxSendMsgSize(64<<20))
	extprocv3.RegisterExternalProcessorServer(server, noop{})
	fmt.Println("LISTENING")
	log.Fatal(server.Serve(listener))
}
